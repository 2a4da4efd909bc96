"""Reads a Hugging Face `config.json`: which family it is of, and values for that family's reader.

The file comes from outside: whatever is in it, the result is a Model or a MemplanError.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, final

from memplan.checks import checked_count, checked_flag, checked_fraction
from memplan.errors import InvalidValue, reason, shown_value, unknown_name
from memplan.files import file_text, json_value, shown_path
from memplan.shapes import BF16, FP16, FP32

if TYPE_CHECKING:
    from pathlib import Path

LARGEST_CONFIG_BYTES: Final = 2 * 1024**2
"""A config.json is a few KiB; a larger file is taken for a mistake."""

MOST_LEVELS: Final = 32
"""The most levels of objects and arrays in a config.json."""


_shown = partial(shown_value, most=120)


STORED_ONLY: Final = ("fp8", "mxfp4", "modelopt", "compressed-tensors")
"""The `quant_method` of formats in which vendors store models that are trained in 16 bits (DeepSeek-V3)."""


OTHER_ATTENTION: Final = ("eager", "flex_attention", "sdpa_paged", "eager_paged")
"""Implementations of transformers' attention that are not planned where a config.json asks for them."""


TRAINED: Final = tuple(dtype.name for dtype in (FP32, BF16, FP16))
"""Types that weights are trained in."""


class WithoutRule(InvalidValue):
    """A setting that a model's family has no rule for."""


@final
@dataclass(frozen=True, slots=True)
class Config:
    """The values of a config.json; keys that are absent or null take the defaults of transformers."""

    values: Mapping[str, Any]

    def value(self, key: str, default: Any) -> Any:
        """Any value."""
        found = self.values.get(key)
        return default if found is None else found

    def count(self, key: str, default: int) -> int:
        """A count."""
        found = self.values.get(key)
        return default if found is None else checked_count(key, found)

    def fraction(self, key: str, default: float) -> float:
        """A number from 0 to 1, without 1."""
        return checked_fraction(key, self.value(key, default))

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        return checked_flag(key, self.value(key, default))

    def one_of(self, key: str, default: str, allowed: tuple[str, ...]) -> str:
        """One of some names."""
        found = self.value(key, default)
        if found not in allowed:
            raise InvalidValue(f"{key}={_shown(found)} is not allowed; memplan knows {', '.join(allowed)}.")
        return str(found)

    def refuse(self, *keys: str) -> None:
        """Raise for settings that change a step's memory and that memplan has no rule for."""
        for key in keys:
            if self.values.get(key):
                raise WithoutRule(f"{key}={_shown(self.values[key])} is not planned by memplan; remove it.")

    def expect(self, key: str, default: Any) -> None:
        """Raise for a setting that is not the default, which memplan has no rule for."""
        if (found := self.value(key, default)) != default:
            raise WithoutRule(f"{key}={_shown(found)} is not planned by memplan; use {default!r}.")

    def remarks(self) -> tuple[str, ...]:
        """A sentence for each setting that would change memory and that a plan does not take from the file.

        Raises:
            InvalidValue: a `quantization_config` of weights that are trained through adapters.
        """
        return (*self._quantization_remarks(), *self._remarks_of_a_run(), *self._dtype_remarks())

    def _remarks_of_a_run(self) -> Iterator[str]:
        """Settings of a run, which a config.json keeps from the run that has written it."""
        for key in ("_attn_implementation", "attn_implementation"):
            if (asked := self.values.get(key)) in OTHER_ATTENTION:
                yield (
                    f"{key}={asked} is ignored: attention is planned as PyTorch's fused function "
                    "runs it where the architecture has it; eager attention keeps the scores of all pairs of "
                    "tokens. Trace the module itself (memplan.trace) to plan another."
                )
        for key in ("gradient_checkpointing", "use_gradient_checkpointing"):
            if self.values.get(key) is True:
                yield f"{key}=true is ignored; use recompute='full' to plan it."

    @property
    def asked_dtype(self) -> str:
        """The key and the type that loaded weights have, as "dtype=bfloat16"; empty if there is none.

        It is the model's, or of one of several models that of the text.
        """
        key, found = self._dtype
        return f"{key}={found}" if found in TRAINED else ""

    @property
    def _dtype(self) -> tuple[str, Any]:
        """The key of the type of loaded weights and what it says."""
        of_text = self.values.get("text_config")
        for values in (self.values, of_text if isinstance(of_text, dict) else {}):
            for key in ("dtype", "torch_dtype"):
                if (found := values.get(key)) is not None:
                    return key, found.removeprefix("torch.") if isinstance(found, str) else found
        return "", None

    def _dtype_remarks(self) -> Iterator[str]:
        """A sentence that the type of loaded weights is ignored, if it is none to train in."""
        key, found = self._dtype
        if key and found not in TRAINED:
            yield f"{key}={_shown(found)} is ignored: weights are trained in {', '.join(TRAINED)}."

    def _quantization_remarks(self) -> tuple[str, ...]:
        """A sentence that the `quantization_config` of a vendor's file is ignored; none where there is none.

        Raises:
            InvalidValue: one of another method than `STORED_ONLY`: such weights are trained through adapters.
        """
        found = self.values.get("quantization_config")
        if not found:
            return ()
        method = found.get("quant_method") if isinstance(found, dict) else None
        if method in STORED_ONLY:
            return (
                f"quantization_config is ignored: it says that the published weights are stored as {method}; "
                "they are planned in the types of the plan's precision.",
            )
        raise InvalidValue(
            f"quantization_config={_shown(found)} is not planned by memplan; remove it to plan training of "
            "all weights, or of adapters beside quantized ones (QLoRA: lora_rank, and quantize='nf4')."
        )

    def without(self, key: str) -> "Config":
        """The values but one."""
        return Config({name: value for name, value in self.values.items() if name != key})

    @property
    def _rope_parameters(self) -> "Config":
        """The rotary settings of a file of transformers 5."""
        parameters = self.value("rope_parameters", {})
        if not isinstance(parameters, dict):
            raise InvalidValue(f"rope_parameters={_shown(parameters)} is not allowed; use an object.")
        return Config(parameters)

    def window(self, default: int) -> int:
        """`sliding_window`: how many tokens back a query looks; 0: no window."""
        found = self.values.get("sliding_window", default)
        return 0 if found is None else checked_count("sliding_window", found, least=0)

    def rotary_part(self, default: float) -> float:
        """The rotated fraction of a head: `partial_rotary_factor`, more than 0 and up to 1."""
        key = "partial_rotary_factor"
        return self._rotary_number(key, default, 1, "use a number above 0, up to 1")

    @property
    def rope_theta(self) -> float:
        """The base of the rotary angles: `rope_parameters.rope_theta` (transformers 5) or `rope_theta`."""
        return self._rotary_number("rope_theta", 10000.0, 1e12, "use a positive number up to 1e12")

    def _rotary_number(self, key: str, default: float, most: float, allowed: str) -> float:
        found = self._rope_parameters.value(key, self.value(key, default))
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found <= most:
            raise InvalidValue(f"{key}={_shown(found)} is not allowed; {allowed}.")
        return float(found)

    @property
    def architecture(self) -> str | None:
        """The class of transformers that the file names; None if it names none."""
        names = self.values.get("architectures")
        if names is None or names == []:
            return None
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise InvalidValue(f"architectures={_shown(names)} is not allowed; use a list of one name.")
        return names[0]

    def model_type(self, known: Mapping[str, str]) -> str:
        """The `model_type`, or the type of the architecture; `known` are architectures by type.

        Raises:
            UnknownName: an architecture without a type that memplan does not know, by name.
            InvalidValue: a file that names neither.
        """
        architecture, found = self.architecture, self.values.get("model_type")
        if found is None and architecture is None:
            raise InvalidValue(
                f"names neither model_type nor architectures; add model_type, one of {', '.join(known)}."
            )
        if found is None:
            found = next((kind for kind, name in known.items() if name == architecture), None)
        if not isinstance(found, str):
            raise unknown_name("model architecture", self.values.get("model_type", architecture), known)
        return found


def config_file(path: str | os.PathLike[str]) -> "Path":
    """The config.json that `path` names: the file itself, or the config.json in a folder.

    Raises:
        InvalidValue: what is no path.
    """
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        raise InvalidValue(f"path={_shown(path)} is not a path; use a string or a pathlib.Path.")
    from pathlib import Path  # slow to import, and rarely needed

    file = Path(path)
    try:
        return file / "config.json" if file.is_dir() else file
    except (OSError, ValueError) as error:
        shown = shown_path(file)
        raise InvalidValue(f"path={shown} cannot be looked up ({reason(error)}); use another path.") from None


def model_name(file: "Path") -> str:
    """The model's name: its folder's for a config.json, else the file's."""
    return (file.resolve().parent.name if file.name == "config.json" else file.stem) or "config"


def read_config(file: "Path") -> Config:
    """The values of a config.json.

    Raises:
        InvalidValue: a file that cannot be read as a model's configuration, and why.
    """
    config = json_value(
        file_text(file, most_bytes=LARGEST_CONFIG_BYTES, what="config.json"),
        what="configuration",
        way_out="use the model's own config.json",
        object_pairs_hook=_without_duplicates,
        parse_constant=_no_constant,
        parse_float=_finite,
    )
    if not isinstance(config, dict):
        raise InvalidValue(f"holds {_kind(config)} where an object is needed; use the model's config.json.")
    _check_levels(config)
    return Config(config)


def _check_levels(config: dict[str, Any]) -> None:
    """Raise for objects and arrays that are nested deeper than any model's are."""
    level: list[Any] = [config]
    for _ in range(MOST_LEVELS):
        parts = [one.values() if isinstance(one, dict) else one for one in level]
        level = [each for part in parts for each in part if isinstance(each, dict | list)]
    if level:
        raise InvalidValue(
            f"is nested deeper than {MOST_LEVELS} levels, which no configuration is; use the model's own "
            "config.json."
        )


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


def _kind(value: object) -> str:
    kinds = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
