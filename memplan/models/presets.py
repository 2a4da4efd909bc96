"""Published models by name: the table `presets.toml`, each entry with its source."""

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
    """The entries of `presets.toml` as they stand there, read once, at first use."""
    return toml_table(Path(__file__).with_name("presets.toml"))


def preset_names() -> tuple[str, ...]:
    """The known names, in the table's order.

    >>> preset_names()[:2]
    ('gpt2', 'gpt2-medium')
    """
    return tuple(preset_table())


def preset(name: str) -> Model:
    """The model of that name.

    >>> preset("llama-3-70b").n_kv_heads
    8

    Raises:
        UnknownName: with the nearest name.
    """
    table = preset_table()
    if not isinstance(name, str) or name not in table:
        raise unknown_name("model", name, table)
    entry = table[name]
    sizes = {key: entry[key] for key in entry if key not in ("family", "source", "retrieved")}
    return Gpt(name=name, **sizes) if entry["family"] == "gpt" else Llama(name=name, **sizes)


def preset_source(name: str) -> str:
    """Where a preset's shape is published.

    >>> preset_source("gpt3-175b")[:41]
    'Brown et al. 2020, arXiv:2005.14165, Tabl'

    Raises:
        UnknownName: with the nearest name.
    """
    table = preset_table()
    if name not in table:
        raise unknown_name("model", name, table)
    return str(table[name]["source"])
