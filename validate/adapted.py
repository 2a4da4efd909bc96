"""Writes traces that records on file need (adapters, DeepSpeed, compiled): `python -m validate.adapted`.

`anew`: also those that are on file.

A trace is named by what it follows from, so that tests find it where they would trace for seconds.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final
from unittest.mock import patch

from memplan import TracedModel
from memplan.engines.torch.options import compiled_blocks, torch_options
from memplan.models.recording import AUTOTP, ULYSSES, ZERO3
from memplan.tracing import cache
from memplan.tracing.cache import Request
from validate.cases import TRACES, Case, option, packed_trace
from validate.predict import estimated_rank
from validate.published.memory import INEXPRESSIBLE, ROWS, by_litgpt, comparable_estimate, compiles, read_rows
from validate.records import read_records
from validate.shipped import data_folder
from validate.traces import write_packed

ADAPTED: Final = TRACES / "adapters"
"""The traces of models with adapters, compressed."""

OF_DEEPSPEED: Final = TRACES / "deepspeed"
"""The traces of models under DeepSpeed's ZeRO-3, and over the ranks of its Ulysses or AutoTP, compressed."""

COMPILED: Final = TRACES / "compiled"
"""The traces of models with compiled blocks, compressed."""

RECORDS: Final = (
    *("adapters.jsonl", "nogpu/*-adapters.jsonl", "nogpu/*-optimizers.jsonl"),
    *("trainers.jsonl", "nogpu/*-trainers.jsonl", "trl.jsonl", "nogpu/*-trl.jsonl"),
    *("nogpu/*-deepspeed.jsonl", "nogpu/*-compiled.jsonl", "nogpu/*-float8.jsonl"),
)
"""The files of records that need them, in `data/measurements`."""


def on_file(asked: Request, traced: Callable[[Request], TracedModel]) -> TracedModel:
    """The trace on file, or one that is made by `traced`."""
    path = path_of(asked)
    return packed_trace(path) if path.exists() else traced(asked)


def path_of(asked: Request) -> Path:
    """Where the trace is, if it is on file."""
    follows_from = asked[:-1] if asked.compiles is None else asked
    key = hashlib.sha256(json.dumps(follows_from).encode()).hexdigest()[:16]
    others = OF_DEEPSPEED if {ZERO3, ULYSSES, AUTOTP} & json.loads(asked.text).keys() else ADAPTED
    return (COMPILED if asked.compiles else others) / f"{asked.name}.{key}.json.xz"


def main(anew: bool) -> None:
    """Trace what the records need and is not on file, or all of it; remove what they do not need."""
    traced, needed = cache._traced, set[Path]()

    def kept(asked: Request) -> TracedModel:
        path = path_of(asked)
        needed.add(path)
        if path.exists() and not anew:
            return packed_trace(path)
        found = traced(asked)
        write_packed(found, path)
        print(f"{path.name}: {found.made_with}", flush=True)
        return found

    with patch.object(cache, "_traced", kept), patch.object(cache, "_entry", lambda *_: None):
        for pattern in RECORDS:
            for file in sorted((data_folder() / "measurements").glob(pattern)):
                for record in read_records(file):
                    case = Case.from_dict(record.case)
                    plan = case.plan
                    float8 = plan.engine == "torch" and torch_options(plan).float8 != "none"
                    others = plan.adapters is not None or plan.engine == "deepspeed"
                    others = others or option(plan, "trainer", "none") != "none"
                    if others or float8 or compiled_blocks(plan):
                        estimated_rank(case, 0)
        for row in read_rows(ROWS):
            traced_anew = by_litgpt(row) or compiles(row)
            if traced_anew and not any(holds(row) for _, holds in INEXPRESSIBLE):
                comparable_estimate(row)
    for path in {*ADAPTED.glob("*.xz"), *OF_DEEPSPEED.glob("*.xz"), *COMPILED.glob("*.xz")} - needed:
        path.unlink()


if __name__ == "__main__":
    main(anew="anew" in sys.argv[1:])
