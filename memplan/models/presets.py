"""Published models by name: the table `presets.toml`, and the presets of other packages' families."""

import os
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from memplan.errors import UnknownName, unknown_name
from memplan.files import Table, toml_table
from memplan.models.base import Model
from memplan.models.families import FAMILIES
from memplan.models.traced import model_from_trace


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
    """The preset of that name.

    >>> preset("llama-3-70b").n_kv_heads
    8

    Raises:
        UnknownName: a name that is not in the table, with the nearest one; an entry of an unknown family.
    """
    entry = _entry(name)
    return _own(name) if name in preset_table() else model_of_entry(name, entry)


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
    sizes = {key: value for key, value in entry.items() if key not in ("family", "source", "retrieved")}
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
        UnknownName: with the nearest name.
    """
    return str(_entry(name)["source"])


def _entry(name: str) -> Mapping[str, Any]:
    table = preset_table()
    if isinstance(name, str) and name in table:
        return table[name]
    others = _others()
    if not isinstance(name, str) or name not in others:
        raise unknown_name("model", name, (*table, *others))
    return others[name]


def _others() -> dict[str, Mapping[str, Any]]:
    """The presets of other packages' families."""
    found: dict[str, Mapping[str, Any]] = {}
    for family in FAMILIES.names()[len(FAMILIES.own) :]:
        entries = FAMILIES.named(family).presets.items()
        found |= {name: {**entry, "family": family} for name, entry in entries}
    return found
