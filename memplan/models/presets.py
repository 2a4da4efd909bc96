"""Published models by name: the table `presets.toml`, and the presets of other packages' families."""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Final, NamedTuple, cast

from memplan.errors import UnknownName, unknown_name
from memplan.files import Table, toml_table
from memplan.models.base import Model
from memplan.models.families import FAMILIES
from memplan.models.trace_from_json import model_from_trace
from memplan.names import read_as, words

NO_SIZES: Final = ("family", "source", "retrieved", "also", "contexts")
"""Keys of an entry that are no sizes."""


def preset_table() -> Table:
    """The entries of `presets.toml`."""
    return toml_table("models/presets.toml")


def preset_names() -> tuple[str, ...]:
    """The names of all presets in the table's order, then the names of other packages' presets.

    >>> preset_names()[:2]
    ('gpt2', 'gpt2-medium')
    """
    return (*preset_table(), *_others())


def preset(name: str) -> Model:
    """The preset of that name, or of one of its other names, which the model's `remarks` say.

    >>> preset("llama-3-70b").n_kv_heads
    8
    >>> preset("Llama-3.1-8B-Instruct").remarks
    ('Llama-3.1-8B-Instruct is read as llama-3.1-8b.',)
    >>> preset("Qwen/Qwen3-8B-Base").remarks
    ('Qwen/Qwen3-8B-Base is read as qwen3-8b with a context of 32768 tokens.',)

    Raises:
        UnknownName: a name that is not in the table, with the nearest one; an entry of an unknown family.
    """
    known, context = _known(name)
    found = _own(known) if known in preset_table() else model_of_entry(known, _others()[known])
    if context is not None:
        return replace(
            found, max_seq_len=context, remarks=read_as(name, f"{known} with a context of {context} tokens")
        )
    remarks = read_as(name, known)
    return replace(found, remarks=remarks) if remarks else found


class Named(NamedTuple):
    """What a name stands for: a preset, and its context in tokens if that is another one."""

    preset: str
    context: int | None = None


MANY: Final = (
    "`memplan models` lists the {} presets; use one of them, the path of a config.json, or a repository of "
    "the Hugging Face Hub, as Qwen/Qwen3-8B."
)
"""The way out of an unknown model's name."""

LONGEST: Final = 200
"""Characters of a name; a longer text is none."""


def preset_named(name: object) -> Named | None:
    """The preset that a name stands for: itself, or one of its other names; None if it is no preset's.

    Names are equal if their `memplan.names.words` are. Other names are the Hub's repositories with a
    config.json of the same sizes, with and without their owner, and short ones.

    >>> preset_named("llama3-8b"), preset_named("llama-33-8b")
    (Named(preset='llama-3-8b', context=None), None)
    """
    if not isinstance(name, str) or len(name) > LONGEST:
        return None
    exact = name in preset_table() or name in _others()
    return Named(name) if exact else _by_words().get(words(name))


def _known(name: object) -> Named:
    known = preset_named(name)
    if known is None:
        raise unknown_name("model", name, preset_names(), MANY.format(len(preset_names())))
    return known


@cache
def _by_words() -> dict[tuple[str, ...], Named]:
    """What the names of presets stand for, by their words; a preset's own name goes before another's."""
    found: dict[tuple[str, ...], Named] = {}
    for name, entry in preset_table().items():
        contexts = dict.fromkeys(_same_sizes(entry), None) | entry.get("contexts", {})
        for other, context in contexts.items():
            for each in (other, other.rpartition("/")[2]):
                found[words(each)] = Named(name, context)
    return found | {words(name): Named(name) for name in preset_table()}


def _same_sizes(entry: Mapping[str, Any]) -> list[str]:
    """The repositories of the same sizes and context, and short names."""
    return [*re.findall(r"config\.json of ([\w.-]+/[\w.-]+)", entry["source"]), *entry.get("also", ())]


@cache
def _own(name: str) -> Model:
    return model_of_entry(name, preset_table()[name])


def model_of_entry(name: str, entry: Mapping[str, Any]) -> Model:
    """The model that an entry of `presets.toml` describes.

    Raises:
        UnknownName: an unknown family, with the nearest one.
    """
    if "trace" in entry:
        return model_from_trace(cast(str, preset_trace(name)))
    sizes = {key: value for key, value in entry.items() if key not in NO_SIZES}
    try:
        family = FAMILIES.named(entry["family"])
    except UnknownName:
        raise unknown_name(f"family of the model {name}:", entry["family"], FAMILIES.names()) from None
    return family.model(name=name, **sizes)


def preset_trace(name: str) -> str | None:
    """The file of a preset that was traced; None for a name that is no such preset."""
    entry = preset_table().get(name, {})
    return os.path.join(os.path.dirname(__file__), "traces", entry["trace"]) if "trace" in entry else None


def preset_source(name: str) -> str:
    """The publication that a preset's sizes are from.

    >>> preset_source("gpt3-175b")[:41]
    'Brown et al. 2020, arXiv:2005.14165, Tabl'

    Raises:
        UnknownName: as `preset`.
    """
    return str(_entry(_known(name).preset)["source"])


def _entry(name: str) -> Mapping[str, Any]:
    table = preset_table()
    return table[name] if name in table else _others()[name]


def _others() -> dict[str, Mapping[str, Any]]:
    """The presets of other packages' families."""
    found: dict[str, Mapping[str, Any]] = {}
    for family in FAMILIES.names()[len(FAMILIES.own) :]:
        entries = FAMILIES.named(family).presets.items()
        found |= {name: {**entry, "family": family} for name, entry in entries}
    return found
