"""What BigScience measured before training BLOOM, beside memplan: `data/published/bigscience.csv`.

Each row is a run of Megatron-DeepSpeed on A100: what `nvidia-smi` showed of the first node in the second
step, its seconds, or that it ran out of memory. memplan replays the allocator on a GPU of that node.
"""

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any, Final, NamedTuple

from memplan.errors import MemplanError
from memplan.estimate import Estimate, estimate
from memplan.files import file_text
from memplan.hardware import Interval, Verdict, outside_allocator
from memplan.launchers.megatron import Arguments
from memplan.text_tables import text_table
from memplan.units import GiB, MiB
from validate.published.order import order_text
from validate.shipped import data_folder

ROWS: Final = data_folder() / "published" / "bigscience.csv"
"""The rows that come with memplan."""

LARGEST_BYTES: Final = 2**20

GB: Final = 1000 * MiB
"""The unit of the published figures: one of them is 80, more than an A100 has in GiB (79.35)."""

ALWAYS: Final = {
    "deepspeed": True, "seq-length": 2048, "position-embedding-type": "alibi", "embed-layernorm": True,
    "pad-vocab-size-to": 250_880, "checkpoint-activations": True,
}  # fmt: skip
"""The arguments of every run.

Source: bigscience-workshop/bigscience, train/tr11-200B-ml/tr11-200B-ml.slurm at 217dc6c and fd075b7.
"""


class Scored(NamedTuple):
    """A row beside memplan: `reason` why it is not predicted, or what was published and predicted.

    `predicted_bytes`: what the allocator reserves on the first stage, and the middle of what CUDA's context
    and NCCL take beside it; `interval`: `Estimate.device_bytes_of` that stage.
    """

    row: dict[str, str]
    reason: str = ""
    predicted_bytes: float = 0
    interval: Interval = Interval(0, 0)
    verdict: Verdict | None = None
    predicted_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `--json` prints them."""
        found = {"row_id": self.row["row_id"], "reason": self.reason}
        if self.reason:
            return found
        figures = {"published_bytes": self.published_bytes, "predicted_bytes": self.predicted_bytes}
        return found | figures | {"verdict": self.verdict, "predicted_s": self.predicted_s}

    @property
    def optimizer(self) -> str:
        """The optimizer, and the type of the weights."""
        return "BF16_Optimizer" if self.row["zero_stage"] == "0" else f"ZeRO-1, {self.row['precision']}"

    @property
    def published_bytes(self) -> int | None:
        """What nvidia-smi showed; None where that is not published."""
        return int(self.row["memory_gb"]) * GB if self.row["memory_gb"] else None

    @property
    def error(self) -> float | None:
        """predicted / published - 1."""
        return self.published_bytes and self.predicted_bytes / self.published_bytes - 1

    @property
    def outside(self) -> float | None:
        """The nearest value of the interval / published - 1: 0 within it."""
        if self.published_bytes is None:
            return None
        low, high = self.interval
        return min(max(self.published_bytes, low), high) / self.published_bytes - 1

    @property
    def ran(self) -> bool:
        """Whether the run did not run out of memory."""
        return self.row["oom"] == "false"

    @property
    def contradicted(self) -> bool:
        """Whether a run that fitted is said not to fit, or the other way round."""
        return self.verdict in (("does not fit",) if self.ran else ("fits", "fits, tight"))


def read_rows() -> list[dict[str, str]]:
    """The rows of the file that comes with memplan."""
    text = file_text(ROWS, most_bytes=LARGEST_BYTES, what="file as data/published/bigscience.csv")
    return list(csv.DictReader(text.splitlines()))


class Planned(NamedTuple):
    """A row's estimate, or why there is none."""

    reason: str = ""
    estimate: Estimate | None = None


def planned(row: dict[str, str]) -> Planned:
    """A row's estimate, or the reason why its plan has no rule."""
    if int(row["dp"]) * int(row["tp"]) * int(row["pp"]) != int(row["n_gpus"]):
        return Planned("its ranks are not as many as its GPUs")
    given: dict[str, Any] = {
        "num-layers": row["n_layers"],
        "hidden-size": row["hidden_size"],
        "num-attention-heads": row["n_heads"],
        "tensor-model-parallel-size": row["tp"],
        "pipeline-model-parallel-size": row["pp"],
        "micro-batch-size": row["micro_batch"],
        "global-batch-size": row["global_batch"],
        "zero-stage": row["zero_stage"],
        row["precision"]: True,
    }
    if row["ends_are_layers"] == "true":
        given["pp-partition-method"] = "type:transformer|embedding"
    arguments = Arguments(ALWAYS | given, {})
    try:
        where = f"{row['n_gpus']}xa100-80-sxm"
        return Planned("", estimate(arguments.model, cluster=where, **arguments.keywords))
    except MemplanError as error:
        return Planned(str(error).partition("; ")[0])


def scored(row: dict[str, str]) -> Scored:
    """A row with its prediction, or with why there is none."""
    reason, found = planned(row)
    if found is None:
        return Scored(row, reason)
    first = found.stages[0]
    interval = found.device_bytes_of(first)
    assert interval is not None  # on a GPU that has rules
    assert first.replayed is not None
    outside = outside_allocator(found.plan.mesh.n_communicators)
    predicted_bytes = first.replayed.reserved_bytes + sum(outside) / 2
    return Scored(row, "", predicted_bytes, interval, found.verdict, found.step_s)


def table(rows: Sequence[Scored]) -> str:
    """The errors of each kind of runs, why others are not predicted, verdicts, and seconds."""
    groups: dict[tuple[str, ...], list[Scored]] = {}
    for one in rows:
        if one.error is not None and not one.reason:
            key = one.optimizer, *[one.row[axis] for axis in ("dp", "tp", "pp")]
            groups.setdefault(key, []).append(one)
    head = "nvidia-smi, BLOOM", "dp", "tp", "pp", "rows", "GiB", "error", "worst", "interval"
    cells: list[tuple[str, ...]] = [head]
    for key, its in groups.items():
        sizes = sorted([(one.published_bytes or 0) / GiB for one in its])
        cells.append((*key, str(len(its)), f"{sizes[0]:.0f}-{sizes[-1]:.0f}", *_errors(its)))
    counts = Counter(one.reason for one in rows if one.reason)
    reasons = [("rows", "not predicted because of"), *[(str(n), why) for why, n in counts.items()]]
    parts = text_table(cells, "<>>>>>>>>", flexible=[0]), text_table(reasons, "><", flexible=[1])
    return "\n\n".join([*parts, "\n".join(summary(rows))])


def _errors(rows: Iterable[Scored]) -> tuple[str, str, str]:
    """The median error with its sign, the largest, and the largest distance from the interval."""
    errors = [one.error or 0.0 for one in rows]
    outside = [one.outside or 0.0 for one in rows]
    return f"{median(errors):+.1%}", f"{max(errors, key=abs):+.1%}", f"{max(outside, key=abs):+.1%}"


def summary(rows: Iterable[Scored]) -> Iterator[str]:
    """The figures of all predicted rows: bytes, verdicts, seconds."""
    predicted = [one for one in rows if not one.reason]
    errors = sorted([abs(one.error) for one in predicted if one.error is not None])
    outside = sorted([abs(one.outside) for one in predicted if one.outside is not None])
    yield (
        f"{len(errors)} rows with memory: median error {median(errors):.1%}, worst {errors[-1]:.1%}, "
        f"{sum(error <= 0.05 for error in errors)} within 5%"
    )
    yield f"against the interval: {sum(not off for off in outside)} within it, worst {outside[-1]:.1%}"
    for text, ran in (("ran", True), ("ran out of memory", False)):
        said = Counter(str(one.verdict) for one in predicted if one.ran == ran)
        listed = ", ".join(f"{n} {verdict}" for verdict, n in said.most_common())
        yield f"{said.total()} that {text}: {listed}"
    timed = [(one.predicted_s, float(one.row["step_s"])) for one in predicted if one.row["step_s"]]
    of_time = [abs(found / published - 1) for found, published in timed if found]
    yield (
        f"{len(of_time)} step times: median error {median(of_time):.1%}, largest {max(of_time):.1%}, "
        f"in order {order_text(timed)}"
    )
