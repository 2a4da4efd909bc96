"""Published measurements of memory beside memplan's predictions: `data/published/memory.csv`, row by row.

A row that memplan cannot express is listed with the reason; one that differs from its plan in something that
memplan has no rule for (compiled blocks, float8) is predicted all the same, and says so.
"""

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, Final
from unittest.mock import patch

from memplan import Cluster, Model, cluster, preset
from memplan.checks import LARGEST_BYTES as LARGEST_GPU_BYTES
from memplan.checks import checked_choice, checked_count
from memplan.engines.torch.options import FLOAT8
from memplan.errors import InvalidValue, MemplanError, reason, shown_value
from memplan.estimate import Estimate, estimate
from memplan.files import file_text, of_file
from memplan.hardware import Verdict
from memplan.text_tables import printable, text_table
from memplan.time.step import Measured
from memplan.units import GiB
from validate.cases import shipped_trace
from validate.published.order import order_text
from validate.records import read_records
from validate.shipped import data_folder

NOGPU_RUNS: Final = data_folder() / "measurements" / "nogpu" / "h200-published.jsonl"
"""Runs of the rows that torchtitan ran on H100, on one that is not there, with the memory of an H200."""

ROWS: Final = data_folder() / "published" / "memory.csv"
"""The rows that come with memplan."""

TOLERANCE: Final = 0.1
"""The largest error of a row that was run as predicted."""

Row = Mapping[str, str]
"""A line of the file, by column; what is not known is empty."""

MODELS: Final[Mapping[str, Model]] = {
    name: preset(name.lower())
    for name in (
        *("Llama-2-7B", "Llama-2-13B", "Llama-2-70B"),
        *("Llama-3-8B", "Llama-3-70B", "Llama-3.1-405B", "Llama-3.2-3B"),
    )
}

LIGHTNING_DEMO: Final = "nn.Transformer demo 1B (32 enc + 32 dec layers)"
"""The module of Lightning's table, which was traced (`validate.systems.torch.lightning_demo`)."""

IMPLEMENTATION: Final = "torchtitan"
"""Whose code ran: torchtitan's, and torchtune's, which is the same to memory."""

USABLE_BYTES: Final = {"H100-SXM 96GB HBM2e (500W)": int(95.04 * GiB)}
"""What torch sees of a GPU that is not in memplan's table, as torchtitan's logs print it."""

GPUS: Final = {
    "A100-SXM 80GB": "a100-80-sxm",
    "A100-SXM 40GB": "a100-40-sxm",
    "H100-SXM 96GB HBM2e (500W)": "h100-sxm",
    "H100-SXM": "h100-sxm",
    "MI300X": "mi300x",
    "B200 (power limited)": "b200",
}

INEXPRESSIBLE: Final[tuple[tuple[str, Callable[[Row], bool]], ...]] = (
    ("quantized weights of an older bitsandbytes", lambda r: "bnb" in r["lora"]),
    ("adapters beside FSDP1", lambda r: by_litgpt(r) and r["zero_stage"] != "0"),
    (
        "adapters other than LoRA, or not stated in full",
        lambda r: r["lora"] not in ("", "false") and not (by_litgpt(r) and r["lora"].startswith("LoRA (")),
    ),
    (
        "optimizer state in 8 or 4 bits, or paged",
        lambda r: "bit" in r["optimizer"] or "Paged" in r["optimizer"],
    ),
    ("activations on the host", lambda r: "activations" in r["offload"]),
    ("a sequence divided over ranks (context parallelism)", lambda r: r["cp"] not in ("", "1")),
    (
        "another architecture, or one that is not stated",
        lambda r: r["model"] not in (*MODELS, LIGHTNING_DEMO),
    ),
    (
        "sequences whose lengths vary or are not stated",
        lambda r: not r["seq_len"] or "unpacked" in r["suspect"],
    ),
    ("a micro-batch that is not stated", lambda r: not r["micro_batch_per_gpu"]),
    ("recomputation that is not stated", lambda r: r["recompute"] == "unknown"),
)
"""The reasons for not predicting a row; the first one that holds is given."""

LATER_RUNS: Final = ("MI300X", "B200 (power limited)")
"""The GPUs of torchao's runs with a later torchtitan, which compiles the loss too."""

DIFFERENCES: Final[tuple[tuple[str, Callable[[Row], bool]], ...]] = (
    ("compiled", lambda r: r["compile"] == "true" and not compiles(r)),
    ("loss", lambda r: compiles(r) and r["gpu"] in LATER_RUNS),
    ("float8", lambda r: "fp8" in r["precision"] and not float8_of(r)),
    ("async", lambda r: "async tp" in r["notes"].lower().replace("asynctp", "async tp")),
    ("litgpt", lambda r: by_litgpt(r)),
    ("zero_grad", lambda r: by_lightning(r) and r["zero_stage"] == "fsdp grad_op"),
    ("no_shard", lambda r: not_sharded(r)),
)
"""What memplan has no rule for: a row is predicted without them, LitGPT's modules as PEFT's.

Lightning's `zero_grad` is after the forward pass, which matters where weights stay gathered until then.
FSDP1's NO_SHARD is predicted as one GPU, which holds all states as each of its ranks does.
"""

ZERO: Final = {"0": 0, "fsdp no_shard": 0, "fsdp grad_op": 2, "fsdp full": 3, "fsdp hybrid": 3}
"""What is divided, by what a row says of ZeRO or FSDP."""

LITGPT: Final[dict[str, Any]] = {"lora_rank": 8, "lora_targets": "q_proj,v_proj", "lora_dropout": 0.05}
"""The adapters of LitGPT's finetune/lora.py at 8641822."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One row: `reason` why there is no prediction, or what was published and predicted.

    `published_bytes` is None where only success or failure is published (`ran`); `predicted_bytes` is of the
    same kind; so is `nogpu_bytes`, what PyTorch's CUDA build makes of the plan where no GPU is.
    `differences`: what the row did beyond the plan that is predicted.
    """

    row: Row
    reason: str = ""
    differences: tuple[str, ...] = ()
    plan: str = ""
    published_bytes: int | None = None
    predicted_bytes: int | None = None
    verdict: Verdict | None = None
    nogpu_bytes: int | None = None
    published_s: float | None = None
    predicted_s: float | None = None

    @property
    def time_error(self) -> float | None:
        """predicted / published seconds of a step - 1; None where no rate is published or predicted."""
        if self.published_s is None or self.predicted_s is None:
            return None
        return self.predicted_s / self.published_s - 1

    @property
    def source(self) -> str:
        """The row's source, without its number."""
        return self.row["row_id"].rpartition("-")[0]

    @property
    def number(self) -> str:
        """The row's number."""
        return self.row["row_id"].rpartition("-")[2]

    @property
    def error(self) -> float | None:
        """predicted / published - 1; None where no bytes are published."""
        if self.published_bytes is None or self.predicted_bytes is None:
            return None
        return self.predicted_bytes / self.published_bytes - 1

    @property
    def ran(self) -> bool:
        """Whether the run did not run out of memory."""
        return self.row["oom"] != "true"

    @property
    def contradicted(self) -> bool:
        """Whether a run that fitted is said not to fit, or the other way round."""
        return self.verdict in (("does not fit",) if self.ran else ("fits", "fits, tight"))

    @property
    def confirmed(self) -> bool:
        """Whether nothing speaks against memplan: an error within `TOLERANCE`, unless the run differs."""
        within = self.error is None or abs(self.error) <= TOLERANCE
        return (within or bool(self.differences)) and not self.contradicted

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `--json` prints them."""
        return {
            "row_id": self.row["row_id"],
            "reason": self.reason,
            "differences": list(self.differences),
            "plan": self.plan,
            "mem_kind": self.row["mem_kind"],
            "published_bytes": self.published_bytes,
            "predicted_bytes": self.predicted_bytes,
            "nogpu_bytes": self.nogpu_bytes,
            "error": self.error,
            "published_s": self.published_s,
            "predicted_s": self.predicted_s,
            "time_error": self.time_error,
            "ran": self.ran,
            "verdict": self.verdict,
        }


LARGEST_BYTES: Final = 2**24

COLUMNS: Final = (
    *("row_id", "framework", "model", "gpu", "n_gpus", "dp", "tp", "cp", "pp", "sp", "zero_stage", "offload"),
    *("micro_batch_per_gpu", "grad_accum", "seq_len", "precision", "optimizer", "recompute", "compile"),
    *("peak_mem_gib", "mem_kind", "tokens_per_s_per_gpu", "oom", "lora", "notes", "suspect"),
)
"""The columns that are read."""


def read_rows(path: Path) -> list[Row]:
    """The file's rows.

    Raises:
        MemplanError: a file that cannot be read, or that lacks a column or a cell.
    """
    try:
        text = file_text(path, most_bytes=LARGEST_BYTES, what="file as data/published/memory.csv")
        reader = csv.DictReader(text.splitlines(keepends=True), strict=True)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise InvalidValue(f"has no column {missing[0]!r}; see data/README.md for the columns.")
        rows: list[Row] = list(reader)
    except csv.Error as error:
        raise of_file(path, InvalidValue(f"is no CSV ({reason(error)}); give another file.")) from None
    except MemplanError as error:
        raise of_file(path, error) from None
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise of_file(
                path, InvalidValue(f"row {number} has not as many cells as there are columns; mend it.")
            )
    return [{name: printable(cell) for name, cell in row.items()} for row in rows]


def compared(row: Row) -> Compared:
    """A row with its prediction.

    Raises:
        MemplanError: a row that is no plan: with its number.
    """
    with named_row(row):
        return _compared(row)


@contextmanager
def named_row(row: Row) -> Iterator[None]:
    """A block whose errors begin with the row's number."""
    try:
        yield
    except MemplanError as error:
        raise type(error)(f"row {shown_value(row['row_id'])}: {error}") from None
    except (ValueError, OverflowError) as error:
        raise InvalidValue(
            f"row {shown_value(row['row_id'])} has no number where one is needed: {reason(error)}"
        ) from None


def _bytes(peak_gib: str) -> int:
    return checked_count("peak_mem_gib in bytes", round(float(peak_gib) * GiB), most=LARGEST_GPU_BYTES)


def comparable_estimate(row: Row) -> Estimate:
    """memplan's estimate of a row's plan, which it can express.

    The releases of torch that these rows ran with choose FlashAttention 2 on every GPU.
    """
    traced = by_lightning(row)
    model = shipped_trace("lightning-demo") if traced else MODELS[row["model"]]
    code = None if traced or by_litgpt(row) else IMPLEMENTATION
    found = estimate(model, implementation=code, cluster=_cluster(row), **_plan(row))
    return replace(found, time_model=Measured(flash=2))


def published_s(row: Row, e: Estimate) -> float | None:
    """Seconds of a step: its tokens over the published rate of all GPUs."""
    rate = row["tokens_per_s_per_gpu"]
    if not rate or e.cluster is None:
        return None
    return e.plan.global_batch * e.plan.seq_len / (float(rate) * e.cluster.n_gpus)


def _compared(row: Row) -> Compared:
    reason = next((text for text, holds in INEXPRESSIBLE if holds(row)), "")
    if reason:
        return Compared(row=row, reason=reason)
    from memplan.tracing import cache as traces  # slow to import, and rarely needed
    from validate.adapted import on_file  # which reads rows in turn

    with patch.object(traces, "_traced", partial(on_file, traced=traces._traced)):
        e = comparable_estimate(row)
    peak_gib = row["peak_mem_gib"]
    return Compared(
        row=row,
        differences=tuple(text for text, holds in DIFFERENCES if holds(row)),
        plan=_plan_text(row, e),
        published_bytes=_bytes(peak_gib) if peak_gib else None,
        predicted_bytes=_held_bytes(row, e),
        verdict=e.verdict,
        nogpu_bytes=_nogpu_bytes(row),
        published_s=published_s(row, e),
        predicted_s=e.step_s,
    )


def _cluster(row: Row) -> Cluster | None:
    gpu = row["gpu"]
    if gpu not in GPUS:
        return None
    n_gpus = 1 if not_sharded(row) else row["n_gpus"]
    found = cluster(f"{n_gpus}x{GPUS[gpu]}")
    if gpu not in USABLE_BYTES:
        return found
    return replace(found, gpu=replace(found.gpu, usable_bytes=USABLE_BYTES[gpu]))


def _plan(row: Row) -> dict[str, Any]:
    """The plan of a row; torchtitan clips gradients and has expandable segments.

    Source: torchtitan's configurations (`max_norm = 1.0`), its run_llama_train.sh
    (`PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"`).
    """
    degrees = {axis: int(row[axis]) for axis in ("dp", "tp", "pp")}
    if not_sharded(row):
        degrees["dp"] = 1
    micro_batch = int(row["micro_batch_per_gpu"])
    return {
        **degrees,
        "sequence_parallel": row["sp"] == "true",
        "zero": zero_of(row),
        "micro_batch": micro_batch,
        "global_batch": degrees["dp"] * micro_batch * int(row["grad_accum"] or 1),
        "seq_len": int(row["seq_len"]),
        "precision": row["precision"] if row["precision"] in ("bf16", "fp32") else "bf16-mixed",
        "clip_grad_norm": 1.0 if by_torchtitan(row) else None,
        "loss_chunks": 8 if _chunks_loss(row) else 1,
        "compile": "block" if compiles(row) else "none",
        **float8_of(row),
        "optimizer_in_backward": "in backward" in row["optimizer"],
        "alloc_conf": "expandable_segments:True" if by_torchtitan(row) else "",
        **_recompute(row),
        **(LITGPT if by_litgpt(row) else {}),
        **(_of_lightning(row) if by_lightning(row) else {}),
    }


def _of_lightning(row: Row) -> dict[str, Any]:
    """Lightning's optimizer, and its FSDP1 with original parameters.

    Source: Lightning-AI/pytorch-lightning, src/lightning/pytorch/strategies/fsdp.py.
    """
    values: dict[str, Any] = {"optimizer": "adam", "offload": row["offload"] == "params cpu"}
    return values | {"fsdp_version": 1, "use_orig_params": True} if zero_of(row) else values


def zero_of(row: Row) -> int:
    """The ZeRO stage of a row's sharding strategy.

    Raises:
        UnknownName: an unknown strategy, with the nearest known one.
    """
    return ZERO[checked_choice("zero_stage", row["zero_stage"], tuple(ZERO))]


def _recompute(row: Row) -> dict[str, Any]:
    """Every second block as a whole is as much as the first half of them."""
    if row["recompute"] == "selective" and ("layer" in row["notes"].lower()):
        return {"recompute": "full", "recompute_blocks": MODELS[row["model"]].n_blocks // 2}
    return {"recompute": row["recompute"]}


def _chunks_loss(row: Row) -> bool:
    """The ladder of torchtune's README is cumulative: from that rung on."""
    return row["framework"] == "torchtune" and row["row_id"] >= "torchtune-0953"


def by_litgpt(row: Row) -> bool:
    """Whether LitGPT trained adapters."""
    return row["framework"].startswith("LitGPT") and row["lora"] not in ("", "false")


def by_lightning(row: Row) -> bool:
    """Whether Lightning trained its demo."""
    return row["model"] == LIGHTNING_DEMO


def not_sharded(row: Row) -> bool:
    """Whether FSDP1 sharded nothing."""
    return row["zero_stage"] == "fsdp no_shard"


def compiles(row: Row) -> bool:
    """Whether blocks were compiled, in a plan for which that has rules.

    torchtitan and torchtune compile each block, and losses from 2025 on, which is left out.
    """
    return row["compile"] == "true" and row["pp"] == "1" and not _chunks_loss(row)


def float8_of(row: Row) -> Mapping[str, str]:
    """The options of products in float8; none where a row does not state them, or they have no rule.

    torchao's tables state an all-gather in float8 for tensorwise scales; torchtitan's commands beside tensor
    parallelism ask for none.

    Source: pytorch/ao docs/source/workflows/training.md, benchmarks/float8/training/torchtitan_benchmark.sh;
    torchtitan/benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md.
    """
    recipe, by_torchao = row["precision"].removeprefix("fp8 "), row["row_id"].startswith("torchao")
    stated = by_torchao or row["row_id"].startswith("torchtitan-asynctp")
    if recipe not in FLOAT8 or not stated or not compiles(row):
        return {}
    gathered = by_torchao and recipe == "tensorwise"
    return {"float8": recipe, "float8_all_gather": "precomputed" if gathered else "none"}


def by_torchtitan(row: Row) -> bool:
    """Whether torchtitan ran it, whose settings are known."""
    return "torchtitan" in row["framework"] or row["row_id"].startswith("torchao")


def _held_bytes(row: Row, e: Estimate) -> int | None:
    """What the row measured: reserved bytes, or allocated ones."""
    return e.reserved_bytes if row["mem_kind"] == "reserved" else e.allocated_bytes


def _nogpu_bytes(row: Row) -> int | None:
    """What a run of the row's plan without a GPU held, of the published kind; None if there was none."""
    measured = _nogpu_runs().get(row["row_id"])
    if measured is None:
        return None
    after = measured["allocator"][-1]
    held: int = after["reserved_bytes" if row["mem_kind"] == "reserved" else "allocated_bytes"]
    return held


@cache
def _nogpu_runs() -> dict[str, Any]:
    """The measurements of the first ranks that `validate sweep --suite gpu-published` ran, by their rows."""
    records = read_records(NOGPU_RUNS)
    return {r.case["name"].partition(",")[0]: r.measured["ranks"][0] for r in records if r.measured}


def _plan_text(row: Row, e: Estimate) -> str:
    """The fields in which a plan differs from the others of its table."""
    plan = e.plan
    degrees = [f"{axis}{n}" for axis in ("dp", "tp", "pp") if (n := getattr(plan, axis)) > 1]
    recompute = {"none": "", "selective": "sel."}.get(plan.recompute, plan.recompute)
    words = (
        e.model.name.removeprefix("llama-"),
        *degrees,
        f"{plan.micro_batch}x{plan.seq_len}",
        recompute if plan.recompute_blocks is None else "half",
        f"{plan.loss_chunks} chunks" if plan.loss_chunks > 1 else "",
    )
    return " ".join(word for word in words if word)


def table(rows: Sequence[Compared]) -> str:
    """All rows for a terminal: predicted ones, verdicts, and why the others are not predicted."""
    sources = dict.fromkeys(c.source for c in rows)
    parts: list[str] = []
    for source in sources:
        its = [c for c in rows if c.source == source]
        parts += [_memory(source, its), _verdicts(source, its)]
    parts += [times_table(rows), reasons_table(rows), _summary(rows)]
    return "\n\n".join(part for part in parts if part)


def _memory(source: str, rows: Sequence[Compared]) -> str:
    measured = [c for c in rows if c.error is not None]
    if not measured:
        return ""
    cells = [("row", "plan", "GiB", "memplan", "error", "nogpu", "but for")]
    cells += [(c.number, c.plan, *_figures(c), "+".join(c.differences)) for c in measured]
    held = measured[0].row["mem_kind"].partition(" ")[0]
    return f"{source}: {held}\n{text_table(cells, '<<>>>><', flexible=[1])}"


def _figures(c: Compared) -> tuple[str, str, str, str]:
    published, predicted = (c.published_bytes or 0) / GiB, (c.predicted_bytes or 0) / GiB
    nogpu = "" if c.nogpu_bytes is None else f"{c.nogpu_bytes / GiB:.2f}"
    return f"{published:.2f}", f"{predicted:.2f}", f"{c.error:+.1%}", nogpu


def _verdicts(source: str, rows: Iterable[Compared]) -> str:
    cells = [("row", "plan", "ran", "memplan", "but for")]
    cells += [
        (c.number, c.plan, "yes" if c.ran else "OOM", c.verdict or "-", "+".join(c.differences))
        for c in rows
        if c.plan and c.error is None
    ]
    return f"{source}: ran or not\n{text_table(cells, '<<<<<', flexible=[1])}" if len(cells) > 1 else ""


def times_table(rows: Iterable[Compared]) -> str:
    """Seconds of a step beside published ones: for each source, GPU and what else its rows did."""
    groups: dict[tuple[str, str, str], list[Compared]] = {}
    for c in rows:
        if c.time_error is not None:
            groups.setdefault((c.source, c.row["gpu"], "+".join(c.differences)), []).append(c)
    cells = [("step times", "GPU", "but for", "rows", "median", "largest", "in order")]
    for (source, gpu, beside), own in groups.items():
        errors = [abs(c.time_error or 0.0) for c in own]
        cells.append(
            (source, gpu, beside, str(len(own)), f"{median(errors):.1%}", f"{max(errors):.1%}", _order(own))
        )
    return text_table(cells, "<<<>>>>", flexible=[1]) if len(cells) > 1 else ""


def _order(rows: Sequence[Compared]) -> str:
    return order_text([(c.predicted_s, c.published_s) for c in rows])


def reasons_table(rows: Iterable[Compared]) -> str:
    """How many rows of each source are not predicted, and why."""
    counts = Counter((c.source, c.reason) for c in rows if c.reason)
    cells = [("not predicted", "rows", "because of")]
    cells += [(source, str(n), reason) for (source, reason), n in counts.items()]
    return text_table(cells, "<><")


def _summary(rows: Iterable[Compared]) -> str:
    errors: dict[bool, list[float]] = {False: [], True: []}
    verdicts: list[bool] = []
    for c in rows:
        if c.error is not None:
            errors[bool(c.differences)].append(abs(c.error))
        if c.verdict is not None:
            verdicts.append(c.contradicted)
    labels = {False: "run as predicted", True: "run with something else besides"}
    lines = [
        f"{len(found)} rows {labels[differs]}: median error {median(found):.1%}, worst {max(found):.1%}"
        for differs, found in errors.items()
        if found
    ]
    return "\n".join([*lines, f"{len(verdicts)} verdicts, {sum(verdicts)} contradicted"])
