"""How many published runs memplan expresses: by where they were published, and by what they did."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from memplan.text_tables import text_table
from validate.published import bigscience, fits, megatron_ci, megatron_times, memory, nemo_times


class Run(NamedTuple):
    """A row of a file.

    `did`: the features that the run used, such as pipelines. `beside`: a feature without a rule; the run is
    predicted without that feature. `reason`: why the run is not predicted. Both are empty where the whole run
    is predicted.
    """

    source: str
    did: frozenset[str]
    beside: str = ""
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `--json` prints them."""
        return self._asdict() | {"did": sorted(self.did)}


FEATURES: Final[Mapping[str, tuple[str, ...]]] = {
    "tensor parallelism": ("tp", "tensor-model-parallel-size"),
    "pipelines": ("pp", "pipeline-model-parallel-size"),
    "context parallelism": ("cp", "context-parallel-size"),
    "expert parallelism": ("ep", "expert-model-parallel-size"),
}
"""Axes of the mesh, by their columns or arguments."""


def runs() -> Iterator[Run]:
    """Every row of `data/published` that has a measurement."""
    for module in (memory, fits):
        for row in memory.read_rows(module.ROWS):
            did = _axes(row) | _of_torch(row)
            reason = _first(module.INEXPRESSIBLE, row)
            beside = "" if reason else _first(module.DIFFERENCES, row)
            yield Run(_source(row), did, beside, reason)
    for row in megatron_ci.read_rows():
        arguments = row["arguments"]
        did = _axes(arguments) | ({"fp8"} if "fp8-format" in arguments else set())
        yield Run(_source(row), did, reason=megatron_ci.planned(row).reason)
    for row in bigscience.read_rows():
        yield Run(_source(row), _axes(row), reason=bigscience.planned(row).reason)
    for row in megatron_times.read_rows():
        yield Run(_source(row), _axes(row))
    for row in nemo_times.read_rows():
        yield Run(_source(row), _axes(row) | {"fp8"})


def _source(row: Mapping[str, Any]) -> str:
    return str(row["row_id"]).rpartition("-")[0]


def _axes(values: Mapping[str, Any]) -> frozenset[str]:
    """The axes along which a run had several ranks."""
    return frozenset(
        name for name, columns in FEATURES.items() if any(int(values.get(one) or 1) > 1 for one in columns)
    )


def _of_torch(row: memory.Row) -> set[str]:
    """What else a run of PyTorch's engine did."""
    found = {
        "compiled blocks": row["compile"] == "true",
        "fp8": "fp8" in row["precision"],
        "FSDP": row["zero_stage"].startswith("fsdp"),
        "adapters": row["lora"] not in ("", "false"),
        "states in 8 bits, or paged": "bit" in row["optimizer"] or "Paged" in row["optimizer"],
    }
    return {name for name, holds in found.items() if holds}


def _first(reasons: Iterable[tuple[str, Any]], row: memory.Row) -> str:
    return next((text for text, holds in reasons if holds(row)), "")


def table(found: Iterable[Run]) -> str:
    """How many runs are expressed in full, but for something, or not at all."""
    every = list(found)
    sources = dict.fromkeys(one.source for one in every)
    features = sorted({name for one in every for name in one.did})
    groups = {
        "source": {name: [one for one in every if one.source == name] for name in sources},
        "with": {name: [one for one in every if name in one.did] for name in features},
    }
    parts = []
    for head, named in groups.items():
        cells = [(head, "runs", "in full", "but for", "not", "most often because of")]
        cells += [(name, *_counts(its)) for name, its in named.items()]
        parts.append(text_table(cells, "<>>>><", flexible=[5]))
    n, in_full, *_ = _counts(every)
    return "\n\n".join([*parts, f"{n} published runs on file: {in_full} expressed in full"])


def _counts(found: Iterable[Run]) -> tuple[str, str, str, str, str]:
    """How many there are, in full, but for something, and not; and the reason that most have."""
    every = list(found)
    why = [one.reason or one.beside for one in every]
    without = [text for text in why if text]
    n_not = sum(bool(one.reason) for one in every)
    most = max(dict.fromkeys(without), key=without.count, default="")
    return str(len(every)), str(len(every) - len(without)), str(len(without) - n_not), str(n_not), most
