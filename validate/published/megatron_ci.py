"""NVIDIA's own bytes beside memplan's: Megatron-LM's functional tests, `data/published/megatron_ci.jsonl`.

Each row is a golden file of these tests: what `torch.cuda.memory_allocated` and `max_memory_allocated` were
on the last rank of a real run. memplan replays the allocator over the played steps, and compares both.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final, NamedTuple

from memplan.device import Device
from memplan.engines.base import ENGINES
from memplan.engines.checks import check_plan
from memplan.engines.options import plan_of
from memplan.errors import InvalidValue, MemplanError, reason
from memplan.files import file_text
from memplan.hardware import gpu
from memplan.launchers.megatron import BERT_SCRIPT, GPT_SCRIPT, Arguments
from memplan.models import Model
from memplan.plan import Plan, Rank
from memplan.replay.peaks import replayed
from memplan.text_tables import text_table
from memplan.units import GiB
from validate.shipped import data_folder

ROWS: Final = data_folder() / "published" / "megatron_ci.jsonl"
"""The rows that come with memplan."""

LARGEST_BYTES: Final = 2**24

GPUS: Final = {"A100-SXM 80GB": "a100-80-sxm", "H100-SXM 80GB": "h100-sxm", "GB200": "gb200"}
"""memplan's names of the GPUs that NVIDIA ran on."""

RELEASE_15: Final = "2025-10-22"
"""The first day of rows of release 0.15; older ones ran in containers that are not stated."""

RELEASES: Final[Mapping[str, str]] = {
    "": "0.12", "2025-04-09": "0.13", RELEASE_15: "0.15", "2025-11-27": "0.16", "2026-05-21": "0.18",
}  # fmt: skip
"""The releases of Megatron-Core whose rules apply to figures that were written from a day on.

The oldest are from before 2659630721, the next from before e7c55de99e. From 5153663876 on MLA has fewer
caches. From 5e4fc931ba on the first tensor rank drops what other stages need.
"""

WRITTEN: Final[Mapping[str, str]] = {
    f"megatron-ci-{number}": day
    for day, numbers in {
        "2025-02-03": (3660, 3667, 3682),
        "2025-04-04": (3659, 3666, 3681),
        "2025-04-06": (3679,),
    }.items()
    for number in numbers
}
"""Rows of grouped experts with figures from before their files' day, when the tests were renamed.

Each day is the date of the commit that first wrote the row's peak (`git log -S`, back from adc69dba2d). Four
rows of sequential experts (3657, 3676, 3677, 3729) are as old, but that release has no rule for them.
"""

LTS_BUMPED: Final = "2025-11-06"
"""From this day on (23a1dcaf74) the LTS container is NGC 25.09; before it was 24.01."""

DEV_BUMPED: Final = "2026-05-07"
"""From this day on (5fe3f06658) the development container is NGC 26.04, which has PyTorch 2.12."""


COPIED: Final = frozenset(["megatron-ci-3664"])
"""Rows with the bytes of another plan's row: that of 3657, without instances of the distributed optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A row: `reason` why it is not predicted, or allocated bytes after a step and at the worst instant."""

    row: Mapping[str, Any]
    reason: str = ""
    rest_bytes: int = 0
    peak_bytes: int = 0

    @property
    def test(self) -> str:
        """The name of NVIDIA's test."""
        return str(self.row["test"])

    @property
    def rest_off(self) -> int:
        """Predicted less measured bytes after a step."""
        return int(self.rest_bytes - self.row["allocated_bytes"])

    @property
    def peak_off(self) -> int:
        """Predicted less measured bytes at the worst instant."""
        return int(self.peak_bytes - self.row["max_allocated_bytes"])

    @property
    def peak_error(self) -> float:
        """predicted / measured - 1 of the worst instant."""
        return float(self.peak_off / self.row["max_allocated_bytes"])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `--json` prints them."""
        found = {"row_id": self.row["row_id"], "test": self.test, "reason": self.reason}
        if self.reason:
            return found
        figures = {"rest_bytes": self.rest_bytes, "peak_bytes": self.peak_bytes}
        return found | figures | {"rest_off": self.rest_off, "peak_off": self.peak_off}


def read_rows(path: Path = ROWS) -> list[dict[str, Any]]:
    """The rows of a file.

    Raises:
        MemplanError: a file that cannot be read.
        InvalidValue: a line that is no row.
    """
    text = file_text(path, most_bytes=LARGEST_BYTES, what="file as data/published/megatron_ci.jsonl")
    try:
        rows = [json.loads(line) for line in text.splitlines()]
        needed = ("row_id", "test", "recorded", "arguments", "allocated_bytes", "max_allocated_bytes")
        if not all(row.get(name) is not None for row in rows for name in needed):
            raise InvalidValue("a row lacks its number, its arguments or its bytes; give another file.")
    except (ValueError, AttributeError) as error:
        raise InvalidValue(f"is no file of rows ({reason(error)}); give another file.") from None
    return rows


class Planned(NamedTuple):
    """A row's model and plan, or why there is none."""

    reason: str = ""
    model: Model | None = None
    plan: Plan | None = None


def planned(row: Mapping[str, Any]) -> Planned:
    """A row's model and plan, or the reason why the plan has no rule."""
    if why := _not_comparable(row):
        return Planned(why)
    given = {"vocab-size": row["vocab_size"], **row["arguments"]}
    try:
        script = BERT_SCRIPT if row["test"].startswith("bert/") else GPT_SCRIPT
        arguments = Arguments(given, row["environment"], script)
        day = WRITTEN.get(row["row_id"], row["recorded"])
        release = max([since for since in RELEASES if since <= day])
        releases = {"megatron_version": RELEASES[release], "ngc_container": _container(row)}
        plan = plan_of(**arguments.keywords, dp=row["dp"], **releases)
        check_plan(arguments.model, plan, _device(row))
    except MemplanError as error:
        return Planned(str(error).partition("; ")[0])
    return Planned("", arguments.model, plan)


def scored(row: Mapping[str, Any]) -> Scored:
    """A row with its prediction, or with why there is none."""
    why, model, plan = planned(row)
    if model is None or plan is None:
        return Scored(row=row, reason=why)
    last = Rank(pp=plan.pp - 1, dp=plan.dp - 1, cp=plan.cp - 1, tp=plan.tp - 1)
    record = ENGINES.named("megatron").play_rank(model, plan, last, _device(row), None)
    if record.program is None:
        raise InvalidValue("a rank without an allocator's program cannot be compared; report it.")
    found = replayed(record.program())
    return Scored(row=row, rest_bytes=found.rest_bytes or 0, peak_bytes=found.allocated_bytes)


def _not_comparable(row: Mapping[str, Any]) -> str:
    """Why a row is not compared, beside what its arguments ask for; empty if it is."""
    if _gpu(row) not in GPUS:
        return "the GPU is not stated"
    if row["row_id"] in COPIED:
        return "its figures are those of another test's file"
    if _compiles_loss(row["arguments"]) and row["recorded"] < RELEASE_15:
        return "a loss that a PyTorch before 2.9 has compiled"
    if not row["dp"]:
        return "the number of GPUs is not stated"
    return ""


def _container(row: Mapping[str, Any]) -> str:
    """NVIDIA's container of the row's day.

    Source: .gitlab/stages/01.build.yml (`BASE_IMAGE`) of adc69dba2d and 23a1dcaf74.
    """
    if "golden_values_lts" in row["source"]:
        return "24.01" if row["recorded"] < LTS_BUMPED else "25.09"
    return "26.04" if row["recorded"] >= DEV_BUMPED else "25.09"


def _compiles_loss(arguments: Mapping[str, Any]) -> bool:
    """Whether Inductor has made the kernels of the loss."""
    by_te = arguments.get("cross-entropy-fusion-impl") == "te"
    return "cross-entropy-loss-fusion" in arguments and not by_te


def _gpu(row: Mapping[str, Any]) -> str:
    """The row's GPU; tests that name none ran on A100 where their recipe has no other platform.

    Source: tests/test_utils/recipes (`platforms: dgx_a100`, for all tests of a file that name none): of
    adc69dba2d for te_2experts, of 23a1dcaf74 for the LTS container.
    """
    names = "_lts.json@23a1dcaf74", "_lts.json@adc69dba2d", "_dev.json@adc69dba2d"
    return str(row["gpu"]) or ("A100-SXM 80GB" if row["source"].endswith(names) else "")


def _device(row: Mapping[str, Any]) -> Device:
    found = gpu(GPUS[_gpu(row)])
    return Device("cuda", found.capability, found.multiprocessors, name=found.name)


def table(rows: Sequence[Scored]) -> str:
    """Predicted rows by test, then why the others are not predicted, then the figures of all."""
    by_test: dict[str, list[Scored]] = {}
    for one in rows:
        if not one.reason:
            by_test.setdefault(one.test, []).append(one)
    cells = [("test", "rows", "GiB", "after a step", "at the peak", "error")]
    for test, its in by_test.items():
        worst = max(its, key=lambda one: abs(one.peak_error))
        gib = f"{worst.row['max_allocated_bytes'] / GiB:.2f}"
        off = f"{worst.rest_off:+,}", f"{worst.peak_off:+,}", f"{worst.peak_error:+.3%}"
        cells.append((test, str(len(its)), gib, *off))
    parts = [text_table(cells, "<>>>>>", flexible=[0]) if by_test else "", _reasons(rows), summary(rows)]
    return "\n\n".join(part for part in parts if part)


def _reasons(rows: Iterable[Scored]) -> str:
    counts = Counter(one.reason for one in rows if one.reason)
    cells = [("rows", "not predicted because of"), *[(str(n), why) for why, n in counts.most_common()]]
    return text_table(cells, "><", flexible=[1]) if counts else ""


def summary(rows: Iterable[Scored]) -> str:
    """The figures of the predicted rows, with experts, whose routing is taken as even, and without."""
    found: dict[str, list[Scored]] = {"without experts": [], "with experts, evenly routed": []}
    for one in rows:
        if not one.reason:
            found[list(found)["num-experts" in one.row["arguments"]]].append(one)
    return "\n".join(line for name, own in found.items() if own for line in _figures(name, own))


def _figures(name: str, rows: Sequence[Scored]) -> Iterator[str]:
    yield f"{len(rows)} rows predicted, {name}"
    if len(rows) < 2:
        return
    errors = sorted(abs(one.peak_error) for one in rows)
    states = sorted(abs(one.rest_off) for one in rows)
    within = [sum(error <= bound for error in errors) for bound in (0.001, 0.01)]
    exact = [sum(off <= bound for off in states) for bound in (1024, 2**22)]
    ninth = quantiles(errors, n=10)[-1]
    yield (
        f"after a step: {exact[0]} within 1,024 bytes, {exact[1]} within 4 MiB; "
        f"median {median(states):,.0f} bytes"
    )
    yield (
        f"at the peak: {within[0]} within 0.1 %, {within[1]} within 1 %; median {median(errors):.3%}, "
        f"90th percentile {ninth:.2%}, worst {errors[-1]:.2%}"
    )
