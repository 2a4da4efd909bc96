"""Plans the much downloaded models for FSDP2 on 8 H100: `python -m tests.downloads [MODEL ...]`.

Writes `data/published/downloads_plans.csv`, of the models that are named only their rows.
"""

import csv
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any, Final

import memplan
from memplan import TracedModel
from memplan.errors import MemplanError

PUBLISHED: Final = Path(__file__).parents[1] / "data" / "published"
ROWS: Final = PUBLISHED / "downloads.jsonl"
PLANS: Final = PUBLISHED / "downloads_plans.csv"
COLUMNS: Final = (
    *("model", "seq_len", "blocks", "modules", "gathers", "peak_bytes", "said"),
    *("first_cpu_s", "second_cpu_s"),
)
"""Blocks by stack and kind in their order; modules that are units alone; all-gathers of a step; the refusal;
seconds of processor time."""

LENGTHS: Final = (512, 448, 64, 1024, 1)
"""Sequences, the first of which that a model takes is planned: 1,024 with an image, 1 without tokens."""


@cache
def downloads() -> dict[str, dict[str, Any]]:
    """The models, by name."""
    return {row["model"]: row for row in map(json.loads, ROWS.read_text().splitlines())}


def plans() -> dict[str, dict[str, str]]:
    """The rows of the file, by model."""
    with PLANS.open(newline="") as file:
        return {row["model"]: row for row in csv.DictReader(file)}


def planned(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the file: the model's config.json planned for FSDP2, or the sentence that refuses it."""
    with TemporaryDirectory() as folder:
        name = row["model"].rpartition("/")[2]
        path = Path(folder) / name / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(row["config"]))
        start, said = process_time(), ""
        for seq_len in LENGTHS:
            plan: dict[str, Any] = {"cluster": "8xh100-sxm", "zero": 3, "micro_batch": 1, "seq_len": seq_len}
            try:
                found = memplan.estimate(path, **plan)
            except MemplanError as refusal:
                said = str(refusal).partition("config.json: ")[2] or str(refusal)
                if said.startswith("seq_len="):
                    continue
                break
            if found.model.max_seq_len < seq_len:
                continue
            first = process_time() - start
            memplan.estimate(path, **plan)
            return {
                "model": row["model"],
                "seq_len": seq_len,
                **units(found.model),
                "gathers": sum([c.calls for c in found.collectives if c.kind == "all_gather"]),
                "peak_bytes": found.worst.peak_bytes,
                "first_cpu_s": round(first, 1),
                "second_cpu_s": round(process_time() - start - first, 2),
            }
    return {"model": row["model"], "said": said, "first_cpu_s": round(process_time() - start, 1)}


def units(model: memplan.Model) -> dict[str, Any]:
    """The blocks of each stack by kind, in their order, and how many modules are units by themselves."""
    if not isinstance(model, TracedModel):
        return {"blocks": " + ".join(str(n) for _, n in model.layers), "modules": 0}
    stacks = [
        " + ".join([str(n) for kind, n in run])
        for role, run in groupby(model.layers, key=lambda layer: model.role(layer.kind))
        if role == "block"
    ]
    idle = sum([n for kind, n in model.layers if model.role(kind) == "idle"])
    alone = sum([model.role(kind) == "module" for kind, _ in model.layers])
    return {"blocks": ", ".join(stacks) + (f", {idle} never called" if idle else ""), "modules": alone}


def total(blocks: str) -> int:
    """The blocks that a row counts.

    >>> total("1 + 6, 8, 27 never called")
    42
    """
    return sum(map(int, blocks.replace("never called", "").replace(",", "+").split("+")))


def write(found: Iterable[Mapping[str, Any]]) -> None:
    """Update the CSV file: each row replaces the earlier row of its model."""
    known: dict[str, Mapping[str, Any]] = dict(plans()) if PLANS.exists() else {}
    for one in found:
        print(", ".join(f"{key} {value}" for key, value in one.items()), flush=True)
        known[one["model"]] = one
        with PLANS.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows([known[model] for model in downloads() if model in known])


def main(names: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of these models; left out: all."""
    return (planned(downloads()[name]) for name in names or downloads())


if __name__ == "__main__":
    write(main(sys.argv[1:]))
