"""Published models by name: the table `presets.toml`, each entry with its source."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from memplan.errors import unknown_name
from memplan.files import toml_table
from memplan.models.base import Model
from memplan.models.gpt import Gpt
from memplan.models.llama import Llama


@cache
def preset_table() -> MappingProxyType[str, dict[str, Any]]:
    """The entries of `presets.toml`, read once at first use."""
    return toml_table(Path(__file__).with_name("presets.toml"))


def preset_names() -> tuple[str, ...]:
    """The names of all presets, in the table's order.

    >>> preset_names()[:2]
    ('gpt2', 'gpt2-medium')
    """
    return tuple(preset_table())


def preset(name: str) -> Model:
    """The preset of that name.

    >>> preset("llama-3-70b").n_kv_heads
    8

    Raises:
        UnknownName: a name that is not in the table, with the nearest one; an entry of an unknown family.
    """
    table = preset_table()
    if not isinstance(name, str) or name not in table:
        raise unknown_name("model", name, table)
    return model_of_entry(name, table[name])


def model_of_entry(name: str, entry: Mapping[str, Any]) -> Model:
    """The model that an entry of `presets.toml` describes.

    Raises:
        UnknownName: an unknown family, with the nearest one.
    """
    families: dict[str, type[Gpt | Llama]] = {"gpt": Gpt, "llama": Llama}
    sizes = dict(entry)
    family, _source, _retrieved = (sizes.pop(key) for key in ("family", "source", "retrieved"))
    if family not in families:
        raise unknown_name(f"family of the model {name}:", family, families)
    return families[family](name=name, **sizes)


def preset_source(name: str) -> str:
    """The publication that a preset's sizes are from.

    >>> preset_source("gpt3-175b")[:41]
    'Brown et al. 2020, arXiv:2005.14165, Tabl'

    Raises:
        UnknownName: with the nearest name.
    """
    table = preset_table()
    if name not in table:
        raise unknown_name("model", name, table)
    return str(table[name]["source"])
