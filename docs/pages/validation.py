"""What was confirmed by what, as tables of the files of records."""

from pathlib import Path
from statistics import median
from typing import Final

from pages.markdown import code, table
from pages.records import ROOT, records_of
from tests.replayed import EXPECTED

SUITES: Final = {
    "quick": "memplan's own modules, every kind of plan",
    "drawn": "plans drawn at random",
    "matrix": "every pair of options",
    "models": "every model known by name, in small",
    "families": "transformers' decoders beside memplan's families",
    "architectures": "transformers' language models, traced",
    "wild": "other people's modules",
    "divided": "transformers' modules over tensor ranks",
    "experts": "transformers' mixtures of experts over expert ranks",
    "torchtitan": "torchtitan's mixtures of experts over expert ranks and pipelines",
    "context": "transformers' modules over context ranks",
    "fsdp1": "FullyShardedDataParallel",
    "adapters": "LoRA and QLoRA by PEFT and bitsandbytes",
    "compiled": "blocks under torch.compile",
    "float8": "linears in float8 by torchao",
    "optimizers": "optimizers of PyTorch, transformers, torchao and bitsandbytes, and in the backward pass",
    "losses": "Liger's fused linear cross-entropy",
    "chunked-loss": "torchtitan's loss in chunks, which pass through the output layer one by one",
    "no-sync": "FSDP2 that accumulates whole gradients",
    "offloading": "inputs of recomputed blocks on the host",
    "trainers": "transformers' Trainer, alone, under DDP and FSDP",
    "trl": "TRL's SFTTrainer, DPOTrainer and GRPOTrainer, alone, under DDP and FSDP2",
    "deepspeed": "DeepSpeed's ZeRO-0 to 3, hpZ, and pipelines",
    "fairscale": "FairScale's OSS under DDP and ShardedDataParallel",
    "colossalai": "Colossal-AI's LowLevelZeroPlugin",
    "fullsize": "single ranks at true size, on tensors without data",
    "gpu-standin": "single ranks of 8 to 1,024, the others played",
    "standin": "single ranks of large worlds",
    "single": "one GPU",
    "nccl": "2 to 8 ranks with NCCL",
    "shared": "several ranks on one GPU",
    "allocator": "the caching allocator's settings",
    "frontier": "the largest that runs, and the smallest that does not",
    "published": "published runs of torchtitan",
}
"""What the files of records are about, by the suite in their names."""


def on_file() -> str:
    """What was confirmed by what: one row for each file of records."""
    folder = ROOT / "data" / "measurements"
    files = [path for path in sorted(folder.glob("*.jsonl")) if path.stem != "refused"]
    cpu = [_file_row(path) for path in [*files, *sorted((folder / "releases").glob("*.jsonl"))]]
    head = ("file", "what", "cases", "ranks", "exact", "median", "worst")
    nogpu = [_nogpu_row(name) for name in sorted(EXPECTED)]
    nogpu_head = ("file", "what", "ranks", "requested", "allocated", "reserved", "worst")
    return f"""# What is on file

One row for each file of `data/measurements`.

## CPU ranks

Everything runs for real, on small models. *Exact* are the cases whose weights, gradients, optimizer state and
collectives equal the prediction to the byte. Median and worst are of the peak's error, each case's rank that
is farthest off.

{table(head, cpu, "23456")}

## Without a GPU

PyTorch's real CUDA software at true size: bytes, no times. Ranks, in how many of them the bytes that tensors
ask for, allocate and reserve equal today's predictions, and how far off the reserved bytes are at most.
[What runs here](nogpu.md) has the reasons.

{table(nogpu_head, nogpu, "23456")}

## Published runs

[Others' GPUs](published.md): `python -m validate published` prints each row beside memplan's prediction, and
`python -m validate published --engine megatron` NVIDIA's own bytes of Megatron-Core.
"""


def _nogpu_row(name: str) -> tuple[str, ...]:
    """A file's ranks, how many are equal in each figure, and how far off reserved bytes are."""
    n_ranks, equal, worst = EXPECTED[name]
    return code(name), _suite_of(name), *(f"{n:,}" for n in (n_ranks, *equal)), f"{worst[-1]:.2%}"


def _suite_of(name: str) -> str:
    """What a file is about."""
    return SUITES[max((suite for suite in SUITES if suite in name), key=len)]


def _file_row(path: Path) -> tuple[str, ...]:
    """A file's cases and ranks, how many are exact, the median and the worst error of a peak."""
    rows = list(records_of(path))
    ran = [row for row in rows if row.get("peak_error") is not None]
    errors = [abs(row["peak_error"]) for row in ran]
    exact = sum(row["states_off_bytes"] == row["collectives_off"] == 0 for row in ran)
    ranks = sum(row["measured"]["ranks"]["n"] for row in ran)
    return (
        code(path.stem),
        _suite_of(path.stem),
        f"{len(ran):,}",
        f"{ranks:,}",
        f"{exact:,}",
        f"{median(errors):.5%}",
        f"{max(errors):.3%}",
    )
