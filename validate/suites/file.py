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
from collections.abc import Iterator
from dataclasses import fields
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Final

from memplan import Model, Plan
from memplan.errors import InvalidValue, MemplanError, unknown_name
from memplan.models.lookup import resolve
from validate.cases import FAMILIES, Case, title
from validate.suites.models import SMALL

CASE_KEYS: Final = ("name", "model", "steps", "seed", "timeout_s")
PLAN_KEYS: Final = tuple(field.name for field in fields(Plan))


def read_suite(path: Path) -> tuple[Case, ...]:
    """The cases of a file, in order, each with a name of its own.

    Raises:
        InvalidValue: a file that cannot be read, that is no TOML, or a case that is no plan: with its number.
    """
    try:
        text = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidValue(f"{path} is no suite ({error}); use a TOML file with [[case]] tables.") from None
    unknown = [key for key in text if key not in ("defaults", "case")]
    if unknown or not _are_tables(text.get("case")) or not isinstance(text.get("defaults", {}), dict):
        what = f"has {unknown[0]!r}" if unknown else "has no cases"
        raise InvalidValue(f"{path} {what}; use one table [defaults] and a [[case]] for each case.")
    cases: list[Case] = []
    for number, table in enumerate(text["case"], start=1):
        try:
            cases += _cases(text.get("defaults", {}) | table)
        except (MemplanError, TypeError) as error:
            raise InvalidValue(f"{path}, case {number}: {error}") from None
    names = [case.name for case in cases]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidValue(f"{path} has two cases named {twice!r}; give each a name of its own.")
    return tuple(cases)


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(table, dict) for table in value)


def _cases(table: dict[str, Any]) -> Iterator[Case]:
    for key in table:
        if key not in (*CASE_KEYS, *PLAN_KEYS):
            raise unknown_name("key", key, (*CASE_KEYS, *PLAN_KEYS))
    choices = [value if isinstance(value, list) else [value] for value in table.values()]
    varied = prod(map(len, choices)) > 1
    for values in product(*choices):
        chosen: dict[str, Any] = dict(zip(table, values, strict=True))
        settings = {key: chosen.pop(key) for key in CASE_KEYS if key in chosen}
        model = _model(settings.pop("model", "llama-small"))
        usual: dict[str, Any] = {"precision": "fp32", "seq_len": min(64, model.max_seq_len)}
        plan = Plan(**usual | chosen)
        name = settings.pop("name", None)
        words = title(model, plan)
        yield Case(
            name=words if name is None else f"{name}: {words}" if varied else name,
            model=model,
            plan=plan,
            **settings,
        )


def _model(named: Any) -> Model:
    if not isinstance(named, dict):
        return SMALL[named] if named in SMALL else resolve(named)
    sizes = dict(named)
    family = sizes.pop("family", None)
    if family not in FAMILIES:
        raise unknown_name("model family", family, FAMILIES)
    return FAMILIES[family](**{"name": str(family)} | sizes)
