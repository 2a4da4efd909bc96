"""Sources: each symbol of PyTorch that a docstring cites is there in the installed release."""

import ast
import re
from collections.abc import Iterator
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest

import memplan
from memplan import ops

PACKAGE = Path(memplan.__file__).parent
SYMBOL = re.compile(r"\btorch(?:\.\w+)*:\w+(?:\.\w+)*")
PYTHON_FILE = re.compile(r"\btorch/[\w/]+\.py\b")
CPP_FILE = re.compile(r"\b\w[\w/]*/\w+\.(?:cpp|cuh?|h|hpp)\b(?!\s+\(`)")

BY_SYMBOL = [
    PACKAGE / name for name in ("tape.py", "shapes.py", "kernels.py", "device.py", "ops", "models", "engines")
]
"""Where Python is cited by symbol and C++ by file and function."""


def docstrings(file: Path) -> Iterator[str]:
    """Those of a module's classes and functions, and of its attributes."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text


def cited(pattern: re.Pattern[str], *places: Path) -> dict[str, list[str]]:
    """What matches, and the files that cite it."""
    found: dict[str, list[str]] = {}
    for place in places:
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            for text in docstrings(file):
                for name in pattern.findall(text):
                    found.setdefault(name, []).append(str(file.relative_to(PACKAGE)))
    return found


SYMBOLS = cited(SYMBOL, PACKAGE)


def test_symbols_are_cited():
    assert len(SYMBOLS) > 60


@pytest.mark.parametrize("symbol", sorted(SYMBOLS), ids=str)
def test_a_cited_symbol_is_in_the_installed_torch(symbol):
    module, _, name = symbol.partition(":")
    try:
        reduce(getattr, name.split("."), import_module(module))
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{symbol}, cited in {', '.join(SYMBOLS[symbol])}: {error}")


def test_a_missing_symbol_would_be_noticed():
    with pytest.raises(AttributeError):
        reduce(getattr, ["Tensor", "no_such_method"], import_module("torch"))


@pytest.mark.parametrize("place", BY_SYMBOL, ids=lambda path: path.name)
def test_python_is_cited_by_symbol_and_cpp_by_file_and_function(place):
    assert not cited(PYTHON_FILE, place)
    assert not cited(CPP_FILE, place)


@pytest.mark.parametrize("rule", [getattr(ops, name) for name in ops.__all__ if name.islower()])
def test_every_rule_names_its_source(rule):
    assert "Source:" in rule.__doc__
