"""The house: what importing costs, what tables must say, what code must not do."""

import ast
import datetime
import os
import subprocess
import sys
import tomllib
from inspect import signature
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import memplan
from memplan.engines.base import ENGINES
from memplan.engines.options import EngineOptions, option_fields
from memplan.fields import Choice
from memplan.plan import FIELDS

ROOT = Path(__file__).parent.parent
PACKAGE = Path(memplan.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
TABLES = sorted(PACKAGE.rglob("*.toml"))

HEAVY = ("numpy", "torch", "pathlib", "pandas", "matplotlib", "click", "rich", "scipy", "validate")

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

ADDED_SECONDS = """
import time
start = time.thread_time()
import numpy
after = time.thread_time()
import memplan
print(after - start, time.thread_time() - after)
"""
"""Of the importing thread: NumPy's own threads are still starting, and the process's time counts them."""


def python(code: str, *options: str) -> str:
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=60, cwd=ROOT, env=ENVIRONMENT
    ).stdout


def test_import_loads_nothing_heavy():
    new = "import sys; before = {*sys.modules}; import memplan; new = {*sys.modules} - before; "
    loaded = python(f"{new}print(*{{name.partition('.')[0] for name in new}})").split()
    assert "memplan" in loaded
    assert not set(HEAVY) & set(loaded)


def test_import_adds_under_a_tenth_of_a_second_to_numpy(tmp_path):
    """Of modules that were compiled before, as an installed package's are.

    On a busy machine, where NumPy takes longer than a tenth of a second, memplan takes less than NumPy.
    """
    compiled = f"pycache_prefix={tmp_path}"
    runs = [map(float, python(ADDED_SECONDS, "-X", compiled).split()) for _ in range(5)]
    assert min([added / max(0.1, numpys) for numpys, added in runs]) < 1


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.name)
def test_every_entry_of_every_table_has_a_source_and_a_date(table):
    entries = tomllib.loads(table.read_text(encoding="utf-8"))
    assert entries
    for name, entry in entries.items():
        assert len(entry["source"]) > 15, name
        assert isinstance(entry["retrieved"], datetime.date), name


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_assert_no_global_no_environment(source):
    tree = ast.parse(source.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"line {node.lineno}"
        assert not isinstance(node, ast.Assert) or source.name == "testing.py", f"line {node.lineno}"
        if source.name != "program.py":  # which reads NO_COLOR, as every program on a terminal does
            assert not (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")), (
                f"line {node.lineno}"
            )


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_function_has_more_than_60_lines_beside_its_docstring(source):
    long = {}
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            told = node.body[0] if ast.get_docstring(node) else None
            lines = node.end_lineno - node.lineno + 1
            lines -= 0 if told is None else told.end_lineno - told.lineno + 1
            if lines > 60:
                long[node.name] = lines
    assert not long


def test_no_unit_is_ambiguous_in_a_name():
    """`_gb`, `_mem`, `_bw` name no unit; only the tables speak the datasheets' `gb_per_s`."""
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            name = node.arg if isinstance(node, ast.arg) else getattr(node, "id", "")
            assert not name.endswith(("_gb", "_gib", "_mb", "_mem", "_bw")), f"{source.name}: {name}"


def test_packages_are_typed_and_licensed():
    assert (PACKAGE / "py.typed").exists()
    assert (ROOT / "validate" / "py.typed").exists()
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_the_calculator_alone_needs_only_numpy():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [line.partition(">")[0] for line in project["dependencies"]] == ["numpy"]
    assert project["scripts"] == {"memplan": "memplan.cli:main"}


def test_constraints_pin_exact_public_versions():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(line.count("==") == 1 and "+" not in line for line in pins)
    assert "torch==2.13.0" in pins


def test_the_options_that_editors_know_are_those_of_the_engines():
    """They are said three times: to type checkers, in the docstring of `memplan.estimate`, and as checked."""
    told = get_type_hints(EngineOptions)
    known = {name: field for engine in ENGINES.own for name, field in option_fields(engine).items()}
    assert told.keys() == known.keys() <= signature(memplan.estimate).parameters.keys()
    assert {*FIELDS, *known} <= signature(memplan.search).parameters.keys()
    for name, field in known.items():
        assert f"            {name}: " in memplan.estimate.__doc__
        if isinstance(field, Choice):
            assert get_args(told[name]) == field.choices


def test_the_import_contracts_have_a_row_for_each_engine():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = {each["id"]: each for each in table["tool"]["importlinter"]["contracts"]}
    assert set(contracts["engines-apart"]["modules"]) == {f"memplan.engines.{name}" for name in ENGINES.own}
