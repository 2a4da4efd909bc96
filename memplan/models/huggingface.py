"""Reads a Hugging Face `config.json` of `gpt2` or `llama`.

The file comes from outside: whatever is in it, the result is a Model or a MemplanError.
"""

import json
import os
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Final

from memplan.checks import checked_count, checked_flag, checked_fraction
from memplan.errors import InvalidValue, MemplanError, unknown_name
from memplan.files import file_text, of_file
from memplan.models.base import Model
from memplan.models.gpt import Gpt
from memplan.models.llama import Llama

LARGEST_CONFIG_BYTES: Final = 2 * 1024**2
"""A config.json is a few KiB; a larger file is taken for a mistake."""

Config = Mapping[str, Any]


def model_from_config(path: str | os.PathLike[str]) -> Model:
    """The Model that a `config.json` describes; `path` is the file or its folder.

    Keys that are absent or null take Hugging Face's defaults; keys that change no size are ignored.

    Neglects: `rope_scaling` (it changes angles, no size), the activation's exact form among GELUs, and
        `torch_dtype` (the plan's precision decides).
    Source: transformers' GPT2Config and LlamaConfig.

    Raises:
        UnknownName: an architecture that memplan does not know, by name.
        InvalidValue: a file that cannot be read as a model's configuration, and why.
    """
    file = _config_file(path)
    try:
        config = _parsed(file_text(file, most_bytes=LARGEST_CONFIG_BYTES, what="config.json"))
        return _reader(config)(config, _name(file))
    except MemplanError as error:
        raise of_file(file, error) from None


def _config_file(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        raise InvalidValue(f"path={_shown(path)} is not a path; use a string or a pathlib.Path.")
    file = Path(path)
    try:
        return file / "config.json" if file.is_dir() else file
    except (OSError, ValueError) as error:
        raise InvalidValue(f"path={_shown(file)} cannot be looked up ({error}); use another path.") from None


def _name(file: Path) -> str:
    """The model's name: its folder's for a config.json, else the file's."""
    return (file.resolve().parent.name if file.name == "config.json" else file.stem) or "config"


def _parsed(text: str) -> Config:
    try:
        config = json.loads(
            text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant, parse_float=_finite
        )
    except MemplanError:
        raise
    except RecursionError:
        raise InvalidValue(
            "is nested too deeply for a configuration; use the model's own config.json."
        ) from None
    except json.JSONDecodeError as error:
        raise InvalidValue(
            f"is not JSON ({error.msg}, line {error.lineno}); it may be truncated: fetch it again."
        ) from None
    except ValueError:
        raise InvalidValue(
            "holds a number with thousands of digits; use the model's own config.json."
        ) from None
    if not isinstance(config, dict):
        raise InvalidValue(f"holds {_kind(config)} where an object is needed; use the model's config.json.")
    return config


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise InvalidValue(
                f"key {_shown(key)} occurs twice, so its value is ambiguous; keep one of them."
            )
        table[key] = value
    return table


def _no_constant(text: str) -> float:
    raise InvalidValue(f"{text} is no JSON number; replace it with a finite one.")


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise InvalidValue(f"{_shown(text)} overflows a float; replace it with a finite number.")
    return value


def _reader(config: Config) -> Callable[[Config, str], Model]:
    """The reader for the architecture that the configuration names."""
    readers: dict[str, tuple[Callable[[Config, str], Model], str]] = {
        "gpt2": (_gpt2, "GPT2LMHeadModel"),
        "llama": (_llama, "LlamaForCausalLM"),
    }
    architecture = _architecture(config)
    kind = config.get("model_type")
    if kind is None:
        kind = next((k for k, (_, a) in readers.items() if a == architecture), None)
    if kind is None and architecture is None:
        raise InvalidValue(
            f"names neither model_type nor architectures; add model_type, one of {', '.join(readers)}."
        )
    if not isinstance(kind, str) or kind not in readers:
        raise unknown_name("model architecture", architecture if kind is None else kind, readers)
    reader, known = readers[kind]
    if architecture not in (None, known):
        raise unknown_name(f"{kind} architecture", architecture, [known])
    return reader


def _architecture(config: Config) -> str | None:
    names = config.get("architectures")
    if names is None or names == []:
        return None
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise InvalidValue(f"architectures={_shown(names)} is not allowed; use a list of one name.")
    return names[0]


def _gpt2(config: Config, name: str) -> Model:
    """Source: transformers, GPT2Config (defaults) and GPT2LMHeadModel."""
    _refuse(config, "add_cross_attention", "reorder_and_upcast_attn", "quantization_config")
    _one_of(config, "activation_function", "gelu_new", ("gelu_new", "gelu_pytorch_tanh", "gelu"))
    d_model = _count(config, "n_embd", 768)
    return Gpt(
        name=name,
        n_layers=_count(config, "n_layer", 12),
        d_model=d_model,
        n_heads=_count(config, "n_head", 12),
        d_ff=_count(config, "n_inner", 4 * d_model),
        vocab_size=_count(config, "vocab_size", 50257),
        max_seq_len=_count(config, "n_positions", 1024),
        tied_head=_flag(config, "tie_word_embeddings", default=True),
        dropout=_single_dropout(config),
    )


def _single_dropout(config: Config) -> float:
    keys = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    rates = [checked_fraction(key, _value(config, key, 0.1)) for key in keys]
    if len(set(rates)) > 1:
        shown = ", ".join(f"{key}={rate}" for key, rate in zip(keys, rates, strict=True))
        raise InvalidValue(f"{shown} differ, but a memplan Gpt has one dropout; set all three equal.")
    return rates[0]


def _llama(config: Config, name: str) -> Model:
    """Source: transformers, LlamaConfig (defaults) and LlamaForCausalLM."""
    _refuse(config, "quantization_config")
    _one_of(config, "hidden_act", "silu", ("silu", "swish"))
    if checked_fraction("attention_dropout", _value(config, "attention_dropout", 0.0)) > 0:
        raise InvalidValue(
            f"attention_dropout={config['attention_dropout']} is not allowed: "
            "memplan's Llama has no dropout; set it to 0.0."
        )
    n_heads = _count(config, "num_attention_heads", 32)
    return Llama(
        name=name,
        n_layers=_count(config, "num_hidden_layers", 32),
        d_model=_count(config, "hidden_size", 4096),
        n_heads=n_heads,
        n_kv_heads=_count(config, "num_key_value_heads", n_heads),
        d_head=_count(config, "head_dim", 0),
        d_ff=_count(config, "intermediate_size", 11008),
        vocab_size=_count(config, "vocab_size", 32000),
        max_seq_len=_count(config, "max_position_embeddings", 2048),
        tied_head=_flag(config, "tie_word_embeddings", default=False),
        attention_bias=_flag(config, "attention_bias", default=False),
        mlp_bias=_flag(config, "mlp_bias", default=False),
        rope_theta=_rope_theta(config),
    )


def _rope_theta(config: Config) -> float:
    """The base of the rotary angles: `rope_parameters.rope_theta` (transformers 5) or `rope_theta`."""
    parameters = _value(config, "rope_parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidValue(f"rope_parameters={_shown(parameters)} is not allowed; use an object.")
    theta = _value(parameters, "rope_theta", _value(config, "rope_theta", 10000.0))
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta <= 1e12:
        raise InvalidValue(f"rope_theta={_shown(theta)} is not allowed; use a positive number up to 1e12.")
    return float(theta)


def _value(config: Config, key: str, default: Any) -> Any:
    value = config.get(key)
    return default if value is None else value


def _count(config: Config, key: str, default: int) -> int:
    value = config.get(key)
    return default if value is None else checked_count(key, value)


def _flag(config: Config, key: str, *, default: bool) -> bool:
    return checked_flag(key, _value(config, key, default))


def _one_of(config: Config, key: str, default: str, allowed: tuple[str, ...]) -> None:
    value = _value(config, key, default)
    if value not in allowed:
        raise InvalidValue(f"{key}={_shown(value)} is not allowed; memplan knows {', '.join(allowed)}.")


def _refuse(config: Config, *keys: str) -> None:
    """Refuse settings that change a step's memory and that memplan has no rule for."""
    for key in keys:
        if config.get(key):
            raise InvalidValue(f"{key}={_shown(config[key])} is not planned by memplan; remove it.")


def _shown(value: object) -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else repr(value)
    text = text if isinstance(text, str) else repr(text)
    return text if len(text) <= 120 else text[:117] + "..."


def _kind(value: object) -> str:
    kinds = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
