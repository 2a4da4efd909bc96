"""Published runs of which only that they fitted and how fast is known: `data/published/fits.csv`."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, get_args

from memplan import Cluster, Link, Llama, Model, cluster, preset
from memplan.estimate import Estimate, estimate
from memplan.hardware import Verdict
from memplan.text_tables import text_table
from memplan.time.step import Measured
from validate.published.memory import (
    Compared,
    Row,
    named_row,
    published_s,
    reasons_table,
    times_table,
    zero_of,
)
from validate.published.mpt import Mpt
from validate.shipped import data_folder

ROWS: Final = data_folder() / "published" / "fits.csv"
"""The rows that come with memplan."""

MPT_SIZES: Final = {
    "MPT-125m": (12, 768, 12),
    "MPT-350m": (24, 1024, 16),
    "MPT-760m": (24, 1536, 12),
    "MPT-1b": (24, 2048, 16),
    "MPT-3b": (32, 2560, 20),
    "MPT-7b": (32, 4096, 32),
    "MPT-13b": (40, 5120, 40),
    "MPT-30b": (48, 7168, 56),
    "MPT-70b": (80, 8192, 64),
}
"""Layers, width and heads, of llm-foundry's scripts/train/yamls/pretrain."""

MPT_VOCABULARY: Final = 50_368

OTHERS: Final[dict[str, Model]] = {
    "Llama-34B": Llama(
        name="llama-34b", n_layers=48, d_model=8192, n_heads=64, n_kv_heads=8, d_ff=22_016,
        vocab_size=32_000, max_seq_len=16_384,
    ),
    **{name: preset(name.lower()) for name in ("Llama-2-7B", "Llama-2-13B", "Llama-2-70B")},
    "GPT-2 XL": preset("gpt2-xl"),
}  # fmt: skip
"""The other models; the one of 34B as in fms-fsdp's utils/config_utils.py."""

GPUS: Final = {
    "A100-SXM 80GB": "a100-80-sxm",
    "A100-SXM 40GB": "a100-40-sxm",
    "H100-SXM 80GB": "h100-sxm",
    "Titan RTX 24GB": "rtx-3090",
}
"""GPUs of memplan's table; that of a Titan RTX is one with as much memory, since no time is asked of it."""

IBM_NODES_GBIT_PER_S: Final = {"A100-SXM 80GB": 400, "H100-SXM 80GB": 800}
"""What a node of eight GPUs has to the others where fms-fsdp ran, by its README."""

INEXPRESSIBLE: Final[tuple[tuple[str, Callable[[Row], bool]], ...]] = (
    (
        "Megatron's modules under DeepSpeed's ZeRO-3",
        lambda r: r["framework"].startswith("Megatron-DeepSpeed"),
    ),
    ("DeepSpeed on one GPU", lambda r: "DeepSpeed" in r["framework"] and r["n_gpus"] == "1"),
    ("a fraction of recomputed blocks that is not stated", lambda r: r["recompute"] == "unknown"),
)
"""The reasons for not predicting a row; the first one that holds is given."""

DIFFERENCES: Final[tuple[tuple[str, Callable[[Row], bool]], ...]] = (
    ("compiled", lambda r: r["compile"] == "true"),
    ("float8", lambda r: r["precision"] == "fp8"),
)
"""What memplan has no rule for beside FSDP1: a row is predicted without it."""

FSDP1: Final[dict[str, Any]] = {"fsdp_version": 1, "clip_grad_norm": 1.0}


def by_llm_foundry(row: Row) -> bool:
    """Whether llm-foundry and Composer ran it."""
    return row["row_id"].startswith("llm-foundry")


def by_fms_fsdp(row: Row) -> bool:
    """Whether IBM's fms-fsdp ran it."""
    return row["row_id"].startswith("fms-fsdp")


def compared(row: Row) -> Compared:
    """A row with its prediction.

    Raises:
        MemplanError: a row that is no plan: with its number.
    """
    with named_row(row):
        reason = next((text for text, holds in INEXPRESSIBLE if holds(row)), "")
        if reason:
            return Compared(row=row, reason=reason)
        e = comparable_estimate(row)
        return Compared(
            row=row,
            differences=tuple(text for text, holds in DIFFERENCES if holds(row)),
            plan=f"{e.model.name} {e.plan.micro_batch}x{e.plan.seq_len}",
            verdict=e.verdict,
            published_s=published_s(row, e),
            predicted_s=e.step_s if row["tokens_per_s_per_gpu"] else None,
        )


def comparable_estimate(row: Row) -> Estimate:
    """memplan's estimate of a row's plan, which it can express.

    Triton's FlashAttention is the first one's; what it reaches on H100 is not known.
    """
    first = attn_impl(row) == "triton" and row["gpu"].startswith("A100")
    found = estimate(_model(row), implementation=_implementation(row), cluster=_cluster(row), **_plan(row))
    return replace(found, time_model=Measured(flash=1 if first else 2))


def attn_impl(row: Row) -> Literal["flash", "triton"]:
    """Whose FlashAttention ran.

    llm-foundry's was Triton's, for which `submit_benchmarks.py` asks by default at the commits in which its
    tables appeared (5f43bf160, b2a43a147), but in the last one, of 128 GPUs and more (5e85bd62d), for which
    flash-attn 2 was installed.
    """
    return "triton" if by_llm_foundry(row) and "Large Scale" not in row["source"] else "flash"


def _model(row: Row) -> Model:
    if by_llm_foundry(row):
        n_layers, d_model, n_heads = MPT_SIZES[row["model"]]
        sizes: dict[str, Any] = {"n_layers": n_layers, "d_model": d_model, "n_heads": n_heads}
        return Mpt(
            name=row["model"].lower(),
            d_ff=4 * d_model,
            vocab_size=MPT_VOCABULARY,
            max_seq_len=int(row["seq_len"]),
            tied_head=True,
            attn_impl=attn_impl(row),
            **sizes,
        )
    return OTHERS[row["model"]]


def _implementation(row: Row) -> str | None:
    """Whose code ran, or is nearest to what ran: IBM's Llama has torchtitan's operations."""
    if by_llm_foundry(row):
        return None
    return "torchtitan" if by_fms_fsdp(row) else "huggingface"


def _cluster(row: Row) -> Cluster:
    found = cluster(f"{row['n_gpus']}x{GPUS[row['gpu']]}")
    if by_fms_fsdp(row):
        bytes_per_s = IBM_NODES_GBIT_PER_S[row["gpu"]] * 1e9 / 8 / found.gpus_per_node
        return replace(found, inter_node=Link(name="IBM's network", bytes_per_s=bytes_per_s))
    return found


def _plan(row: Row) -> dict[str, Any]:
    """The plan of a row."""
    n_gpus, micro_batch = int(row["n_gpus"]), int(row["micro_batch_per_gpu"])
    values = {
        "zero": zero_of(row),
        "micro_batch": micro_batch,
        "global_batch": n_gpus * micro_batch * int(row["grad_accum"] or 1),
        "seq_len": int(row["seq_len"]),
    }
    if by_llm_foundry(row):
        return values | _of_llm_foundry(row)
    return values | (_of_fms_fsdp(row) if by_fms_fsdp(row) else {"precision": "fp16-mixed"})


def _of_llm_foundry(row: Row) -> dict[str, Any]:
    """Composer's FSDP1: Adam parameter by parameter, no `no_sync`, gradients reduced by its MP mode.

    Source: composer v0.17.2, trainer/dist_strategy.py (`set_fsdp_default`), trainer/mosaic_fsdp_utils.py
    (`get_mixed_precision`: DEFAULT reduces in float32, PURE in bfloat16), optim/decoupled_weight_decay.py.
    The rows of PURE are of torch 1.13, which has no `use_orig_params`.
    """
    pure = row["notes"] == "MP mode PURE"
    return FSDP1 | {
        "precision": "bf16-mixed-reduce-bf16" if pure else "bf16-mixed",
        "use_orig_params": not pure,
        "backward_prefetch": "post",
        "optimizer_impl": "for-loop",
        "recompute": row["recompute"],
    }


def _of_fms_fsdp(row: Row) -> dict[str, Any]:
    """fms-fsdp's FSDP1; every second block as a whole is as much as the first half of them.

    Source: foundation-model-stack/fms-fsdp at 5a296afe42, main_training_llama.py, fms_fsdp/policies.
    """
    values = FSDP1 | {
        "precision": "bf16-mixed-reduce-bf16",
        "use_orig_params": row["compile"] == "true",
        "recompute": row["recompute"],
    }
    if row["recompute"] == "half":
        values |= {"recompute": "full", "recompute_blocks": OTHERS[row["model"]].n_blocks // 2}
    if row["zero_stage"] == "fsdp hybrid":
        values |= {"dp": 8, "dp_replicate": int(row["n_gpus"]) // 8}
    return values


def table(rows: Sequence[Compared]) -> str:
    """All rows for a terminal: verdicts, times, and why the others are not predicted."""
    parts = (_verdicts(rows), times_table(rows), reasons_table(rows), _summary(rows))
    return "\n\n".join(part for part in parts if part)


def _verdicts(rows: Iterable[Compared]) -> str:
    """How many rows of each source and GPU have each verdict."""
    groups: dict[tuple[str, str, str], Counter[Verdict]] = {}
    for c in rows:
        if c.verdict is not None:
            key = c.source, c.row["gpu"], "yes" if c.ran else "OOM"
            groups.setdefault(key, Counter())[c.verdict] += 1
    verdicts = get_args(Verdict)
    cells = [("verdicts", "GPU", "ran", *verdicts)]
    cells += [(*key, *[str(counts[verdict]) for verdict in verdicts]) for key, counts in groups.items()]
    return text_table(cells, "<<<>>>>", flexible=[1])


def _summary(rows: Iterable[Compared]) -> str:
    said = [c for c in rows if c.verdict is not None]
    return f"{len(said)} verdicts, {sum(c.contradicted for c in said)} contradicted"
