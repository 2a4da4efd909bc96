"""A suite written as a TOML file.

```toml
[defaults]                  # what every case has unless it says otherwise
model = "llama-small"       # a small model of the suites, a preset, a config.json, or a table of sizes
seq_len = 64

[[case]]                    # one case for every combination of the lists
dp = 2
zero = [0, 1, 2, 3]
precision = ["fp32", "bf16-mixed"]

[[case]]
name = "uneven stages"      # left out: named after the plan
pp = 2
layers_per_stage = [[1, 3]] # a list of the lists to try

[case.model]
family = "llama"
n_layers = 4
d_model = 64
n_heads = 4
d_ff = 128
vocab_size = 256
max_seq_len = 64
```
"""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Final

from memplan.checks import checked_count, checked_positive
from memplan.engines.options import plan_fields, plan_of
from memplan.errors import InvalidValue, MemplanError, reason, shown_value, unknown_name
from memplan.files import file_text, of_file, shown_path
from memplan.models import Decoder
from validate.cases import LEAST_STEPS, OWN, Case, runnable, title
from validate.suites.models import SMALL

CASE_KEYS: Final = ("name", "model", "steps", "seed", "timeout_s")

LARGEST_BYTES: Final = 2**20
"""A suite is written by people."""

MOST_CASES: Final = 10_000
"""A suite of more cases is a mistake: a night has time for a few hundred."""

LONGEST_S: Final = 10**6
"""Seconds that a case may take at most; more is a mistake."""


def read_suite(path: Path) -> tuple[Case, ...]:
    """The cases of a file, in order, each with a name of its own.

    Raises:
        InvalidValue: a file that cannot be read, that is no TOML, or a case that is no plan: with its number
            and the key.
    """
    try:
        text = file_text(path, most_bytes=LARGEST_BYTES, what="suite of [[case]] tables in TOML")
        cases = list(_suite(tomllib.loads(text)))
    except MemplanError as error:
        raise of_file(path, error) from None
    except (ValueError, RecursionError) as error:
        raise InvalidValue(
            f"{shown_path(path)} is no suite ({reason(error)}); use a TOML file with [[case]] tables."
        ) from None
    return tuple(cases)


def _suite(tables: dict[str, Any]) -> Iterator[Case]:
    for key in tables:
        if key not in ("defaults", "case"):
            raise unknown_name("table", key, ("defaults", "case"))
    defaults, given = tables.get("defaults", {}), tables.get("case")
    if not isinstance(defaults, dict):
        raise InvalidValue(f"defaults={shown_value(defaults)} is no table; write [defaults], then its keys.")
    if not isinstance(given, list) or not given or not all(isinstance(table, dict) for table in given):
        raise InvalidValue("there are no cases; write [[case]] for each, then its keys.")
    every = [defaults | table for table in given]
    _check_number(every)
    seen: set[str] = set()
    for number, table in enumerate(every, start=1):
        try:
            for case in _cases(table):
                if case.name in seen:
                    raise InvalidValue(
                        f"a case named {shown_value(case.name)} is there already; name this one."
                    )
                seen.add(case.name)
                yield case
        except MemplanError as error:
            raise InvalidValue(f"case {number}: {error}") from None


def _check_number(tables: Sequence[dict[str, Any]]) -> None:
    """Raise unless the combinations of all lists are so few that they can be run."""
    numbers = [prod(len(value) for value in table.values() if isinstance(value, list)) for table in tables]
    if sum(numbers) > MOST_CASES:
        raise InvalidValue(
            f"its lists make {sum(numbers)} cases, and more than {MOST_CASES} are a mistake; shorten them."
        )
    if 0 in numbers:
        raise InvalidValue(
            f"case {numbers.index(0) + 1} has an empty list; name at least one value, or no key."
        )


def _cases(table: dict[str, Any]) -> Iterator[Case]:
    known = (*CASE_KEYS, *plan_fields())
    for key in table:
        if key not in known:
            raise unknown_name("key", key, known)
    choices = [value if isinstance(value, list) else [value] for value in table.values()]
    varied = prod(map(len, choices)) > 1
    for values in product(*choices):
        chosen: dict[str, Any] = dict(zip(table, values, strict=True))
        settings = _settings({key: chosen.pop(key) for key in CASE_KEYS if key in chosen})
        model = _model(settings.pop("model", "llama-small"))
        usual: dict[str, Any] = {"precision": "fp32", "seq_len": min(64, model.max_seq_len)}
        plan = plan_of(**usual | chosen)
        name = settings.pop("name", None)
        words = title(model, plan)
        yield Case(
            name=words if name is None else f"{name}: {words}" if varied else name,
            model=model,
            plan=plan,
            **settings,
        )


def _settings(asked: dict[str, Any]) -> dict[str, Any]:
    """The settings of a case beside its plan, each checked."""
    if "name" in asked and not (isinstance(asked["name"], str) and asked["name"].strip()):
        raise InvalidValue(f"name={shown_value(asked['name'])} is not allowed; use a text that is not empty.")
    if "steps" in asked:
        checked_count("steps", asked["steps"], least=LEAST_STEPS)
    if "seed" in asked:
        checked_count("seed", asked["seed"], least=0)
    if "timeout_s" in asked and checked_positive("timeout_s", asked["timeout_s"]) > LONGEST_S:
        raise InvalidValue(f"timeout_s={asked['timeout_s']} is not allowed; use at most {LONGEST_S} seconds.")
    return asked


def _model(named: Any) -> Decoder:
    if isinstance(named, str) and named in SMALL:
        return SMALL[named]
    if not isinstance(named, dict):
        return runnable(named)
    sizes = dict(named)
    family = sizes.pop("family", None)
    if not isinstance(family, str) or family not in OWN:
        raise unknown_name("model family", family, OWN)
    known = [field.name for field in fields(OWN[family]) if field.compare]
    for key in sizes:
        if key not in known:
            raise unknown_name(f"key of a {family} model", key, known)
    required = [field.name for field in fields(OWN[family]) if field.default is MISSING]
    for key in required:
        if key not in sizes and key != "name":
            raise InvalidValue(f"the model has no {key}; a {family} model needs {', '.join(required[1:])}.")
    return OWN[family](**{"name": family} | sizes)
