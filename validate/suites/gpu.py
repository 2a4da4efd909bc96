"""Suites for GPUs. Where there is none they run in their smallest form: the same rows, in small, on CPU.

Each is a flat list of rows, a model and a plan; on one GPU each takes some minutes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from memplan import Llama, Plan
from memplan.engines.options import plan_of, with_said
from memplan.errors import InvalidValue
from memplan.estimate import rank_estimate
from memplan.hardware import gpu
from memplan.models import Decoder, Model, implemented, resolve
from memplan.precisions import PRECISIONS
from memplan.tape import Backend
from validate.cases import GPU_STEPS, UNTIMED_STEPS, Case, runnable, title
from validate.gpus import Gpus
from validate.predict import estimated_rank
from validate.published.memory import ROWS, by_torchtitan, comparable_estimate, compared, read_rows
from validate.suites.adapters import gpu_adapters
from validate.suites.colossalai import gpu_colossalai
from validate.suites.compiled import gpu_compiled
from validate.suites.divided import gpu_divided
from validate.suites.fairscale import gpu_fairscale
from validate.suites.families import gpu_families
from validate.suites.float8 import gpu_float8
from validate.suites.losses import gpu_losses
from validate.suites.models import in_small
from validate.suites.no_sync import gpu_no_sync
from validate.suites.offloading import gpu_offloading
from validate.suites.optimizers import gpu_optimizers
from validate.suites.torchtitan import gpu_torchtitan
from validate.suites.trainers import gpu_trainers
from validate.suites.trl import gpu_trl
from validate.suites.wild import gpu_wild

LLAMA_100M: Final = Llama(
    name="llama-100m", n_layers=12, d_model=768, n_heads=12, n_kv_heads=4, d_ff=2048, vocab_size=32_000,
    max_seq_len=32_768,
)  # fmt: skip
LLAMA_1B: Final = replace(
    LLAMA_100M, name="llama-1b", n_layers=16, d_model=2048, n_heads=32, n_kv_heads=8, d_ff=8192
)
LLAMA_3B: Final = replace(
    LLAMA_1B, name="llama-3b", n_layers=28, d_model=3072, n_heads=24, vocab_size=128_256
)
GPT2: Final = replace(runnable("gpt2"), max_seq_len=32_768, tied_head=False, dropout=0.0, vocab_size=50_264)

Row = tuple[Decoder, dict[str, Any]]
"""A model and its plan's options."""

SINGLE: Final[tuple[Row, ...]] = (
    *(
        (model, {"precision": precision, "micro_batch": 4})
        for model in (GPT2, LLAMA_100M)
        for precision in PRECISIONS.own
    ),
    *(
        (model, {"seq_len": seq_len})
        for model in (GPT2, LLAMA_100M)
        for seq_len in (512, 4096, 16_384, 32_768)
    ),
    *(
        (model, {"recompute": recompute, "micro_batch": 4})
        for model in (GPT2, LLAMA_100M)
        for recompute in ("selective", "full")
    ),
    (LLAMA_100M, {"recompute": "full", "recompute_blocks": 4}),
    (LLAMA_100M, {"optimizer": "sgd"}),
    (LLAMA_100M, {"optimizer": "sgd-momentum"}),
    (LLAMA_100M, {"optimizer": "adam"}),
    (LLAMA_100M, {"optimizer_impl": "for-loop"}),
    (LLAMA_100M, {"optimizer_impl": "foreach"}),
    (LLAMA_100M, {"optimizer_impl": "fused"}),
    (LLAMA_100M, {"clip_grad_norm": 1.0}),
    (LLAMA_100M, {"set_to_none": False}),
    (LLAMA_100M, {"loss_chunks": 8, "micro_batch": 4}),
    (LLAMA_100M, {"micro_batch": 2, "global_batch": 8}),
    (replace(LLAMA_100M, tied_head=True), {}),
    (replace(GPT2, tied_head=True, dropout=0.1), {"micro_batch": 4}),
    (runnable("gpt2-medium"), {"micro_batch": 4}),
    (runnable("gpt2-large"), {"micro_batch": 4}),
    (runnable("gpt2-xl"), {"micro_batch": 2}),
    (LLAMA_1B, {"seq_len": 2048, "micro_batch": 2}),
    (LLAMA_1B, {"seq_len": 32_768, "recompute": "full", "precision": "bf16", "loss_chunks": 8}),
    (LLAMA_3B, {"seq_len": 4096, "precision": "bf16"}),
    (runnable("llama-3-8b"), {"seq_len": 4096, "precision": "bf16", "optimizer_impl": "fused"}),
    (runnable("gpt3-175b"), {"seq_len": 2048, "precision": "bf16", "recompute": "full"}),
)
"""One GPU: both families from 100M to what fits, 512 to 32k tokens, every precision and optimizer."""

WIDE: Final = runnable("llama-3-8b")
LARGE: Final = runnable("llama-3-70b")
LARGEST: Final = runnable("llama-3.1-405b")
GPT3: Final = replace(runnable("gpt3-175b"), tied_head=False, vocab_size=50_264, max_seq_len=4096)
SP8: Final[dict[str, Any]] = {"tp": 8, "sequence_parallel": True}
FULL: Final[dict[str, Any]] = {"recompute": "full"}

STAND_INS: Final[tuple[tuple[Decoder, dict[str, Any], Sequence[int]], ...]] = (
    (WIDE, {"dp": 8}, (0,)),
    (WIDE, {"dp": 8, "gradient_as_bucket_view": True}, (3,)),
    (WIDE, {"dp": 1024, **FULL}, (1023,)),
    (WIDE, {"dp": 8, "zero": 1}, (0, 7)),
    (WIDE, {"dp": 64, "zero": 1, "optimizer": "sgd-momentum"}, (63,)),
    (WIDE, {"dp": 8, "zero": 2}, (0,)),
    (WIDE, {"dp": 8, "zero": 3}, (0, 7)),
    (WIDE, {"dp": 8, "zero": 3, "precision": "bf16"}, (0,)),
    (WIDE, {"dp": 8, "zero": 3, "precision": "fp32", **FULL}, (0,)),
    (WIDE, {"dp": 64, "zero": 3, "recompute": "selective"}, (63,)),
    (WIDE, {"dp": 64, "zero": 3, "fsdp_units": "block+ends"}, (1,)),
    (WIDE, {"dp": 64, "zero": 3, "fsdp_blocks": 4, **FULL}, (63,)),
    (WIDE, {"dp": 8, "zero": 3, "micro_batch": 2, "global_batch": 64, **FULL}, (7,)),
    (WIDE, {"dp": 64, "zero": 3, "clip_grad_norm": 1.0}, (0,)),
    (WIDE, {"dp": 64, "zero": 3, "offload": True, **FULL}, (0,)),
    (WIDE, {"dp": 512, "zero": 3}, (511,)),
    (WIDE, {"dp": 8, "dp_replicate": 8, "zero": 3}, (0,)),
    (WIDE, {"dp": 64, "dp_replicate": 16, "zero": 3}, (1023,)),
    (WIDE, {"dp": 64, "dp_replicate": 16, "zero": 2}, (512,)),
    (WIDE, {"tp": 8}, (0,)),
    (WIDE, {**SP8}, (7,)),
    (WIDE, {"dp": 16, "tp": 4, "zero": 1}, (63,)),
    (WIDE, {"dp": 8, **SP8, "zero": 2}, (0,)),
    (WIDE, {"dp": 128, **SP8, "zero": 3}, (0, 1023)),
    (WIDE, {"dp": 128, "tp": 8, "zero": 0}, (1023,)),
    (WIDE, {"dp": 16, "dp_replicate": 8, "tp": 8, "zero": 3}, (1023,)),
    (LARGE, {"pp": 4, "tp": 8, **FULL}, (0, 31)),
    (LARGE, {"pp": 4, "dp": 4, **SP8, "zero": 1, **FULL}, (0, 63, 127)),
    (LARGE, {"pp": 4, "dp": 2, **SP8, "schedule": "gpipe", "zero": 1, **FULL}, (0, 63)),
    (LARGE, {"pp": 4, "dp": 2, **SP8, "schedule": "interleaved-1f1b", "virtual_stages": 2, **FULL}, (0, 63)),
    (LARGE, {"pp": 4, **SP8, "schedule": "zero-bubble", "virtual_stages": 2}, (0, 31)),
    (LARGE, {"pp": 4, **SP8, "schedule": "zbv", "virtual_stages": 2}, (0, 31)),
    (LARGE, {"pp": 8, "dp": 16, **SP8, "zero": 1, **FULL}, (0, 512, 1023)),
    (LARGE, {"pp": 8, "dp": 16, **SP8, "zero": 2, **FULL}, (512,)),
    (LARGE, {"pp": 2, "dp": 64, **SP8, "zero": 3, **FULL}, (0, 1023)),
    (LARGE, {"dp": 64, "dp_replicate": 2, **SP8, "zero": 3, **FULL}, (1023,)),
    (GPT3, {"pp": 8, "dp": 16, **SP8, "zero": 1, **FULL}, (0, 1023)),
    (GPT3, {"dp": 64, **SP8, "zero": 3, **FULL}, (511,)),
    (LARGEST, {"pp": 16, "dp": 8, **SP8, "zero": 1, **FULL}, (0, 512, 1023)),
    (LARGEST, {"dp": 128, **SP8, "zero": 3, **FULL}, (0, 1023)),
)
"""One rank of 8 to 1,024: model, mesh and which ranks; the shapes of 8B to 405B models."""

SHARED: Final[tuple[Row, ...]] = (
    *((LLAMA_100M, {"dp": 2, "zero": zero}) for zero in range(4)),
    (GPT2, {"dp": 2}),
    (GPT2, {"dp": 4, "zero": 3}),
    (LLAMA_100M, {"dp": 8}),
    (LLAMA_100M, {"dp": 8, "zero": 3}),
    (LLAMA_100M, {"dp": 4, "zero": 3, "precision": "bf16", **FULL}),
    (LLAMA_100M, {"dp": 4, "zero": 2, "precision": "fp32"}),
    (LLAMA_100M, {"dp": 2, "zero": 3, "precision": "fp16-mixed"}),
    (LLAMA_100M, {"dp": 2, "zero": 3, "offload": True}),
    (LLAMA_100M, {"dp": 2, "zero": 3, "clip_grad_norm": 1.0}),
    (LLAMA_100M, {"dp": 2, "dp_replicate": 2, "zero": 3}),
    (LLAMA_100M, {"tp": 2}),
    (GPT2, {"tp": 2, "sequence_parallel": True}),
    (LLAMA_100M, {"tp": 4, "sequence_parallel": True}),
    (LLAMA_100M, {"dp": 2, "tp": 2, "zero": 1}),
    (LLAMA_100M, {"dp": 2, "tp": 2, "sequence_parallel": True, "zero": 3}),
    (LLAMA_100M, {"dp": 2, "tp": 4, "sequence_parallel": True, "zero": 2, **FULL}),
)
"""Ranks that share one GPU: real collectives, each rank with an allocator of its own; no pipelines."""

PIPELINES: Final[tuple[Row, ...]] = (
    *((LLAMA_100M, {"pp": 2, "schedule": schedule}) for schedule in ("gpipe", "1f1b")),
    (GPT2, {"pp": 2, "schedule": "interleaved-1f1b", "virtual_stages": 2}),
    (LLAMA_100M, {"pp": 2, "schedule": "zbv", "virtual_stages": 2}),
    (LLAMA_100M, {"pp": 2, "dp": 2, "zero": 1}),
    (LLAMA_100M, {"pp": 2, "dp": 2, "zero": 3, **FULL}),
    (LLAMA_100M, {"pp": 2, "tp": 2, "sequence_parallel": True}),
    (LLAMA_100M, {"pp": 2, "dp": 2, "tp": 2, "sequence_parallel": True, "zero": 1}),
)
"""Plans for several GPUs: pipelines."""


def gpu_single(gpus: Gpus | None) -> tuple[Case, ...]:
    """One GPU and no process group; models too large for it with as many layers as fit."""
    return tuple(_cases(SINGLE, gpus))


def gpu_shared(gpus: Gpus | None) -> tuple[Case, ...]:
    """Two to eight ranks on one GPU that talk by gloo."""
    return tuple(_cases(SHARED, gpus, small=narrow))


def gpu_nccl(gpus: Gpus | None) -> tuple[Case, ...]:
    """As many ranks as there are GPUs.

    Raises:
        InvalidValue: with a single GPU.
    """
    if gpus is not None and gpus.n < 2:
        raise InvalidValue("gpu-nccl needs at least 2 GPUs and this machine has 1; use gpu-shared.")
    most = gpus.n if gpus else 4
    cases = _cases((*SHARED, *PIPELINES), gpus, small=narrow, backend="nccl" if gpus else "gloo")
    return tuple(case for case in cases if case.plan.world_size <= most)


def gpu_standin(gpus: Gpus | None) -> tuple[Case, ...]:
    """One rank of a world with stand-ins for the others; as many layers as fit one GPU."""
    return tuple(
        case for model, options, ranks in STAND_INS for case in _stand_ins(model, options, ranks, gpus)
    )


FSDP1: Final[tuple[tuple[Decoder, dict[str, Any], Sequence[int]], ...]] = tuple(
    (model, {"zero": 3, "fsdp_version": 1, **options}, ranks)
    for model, options, ranks in (
        (WIDE, {"dp": 8}, (0, 7)),
        (WIDE, {"dp": 8, "use_orig_params": True}, (0, 7)),
        (WIDE, {"dp": 8, **FULL}, (0,)),
        (WIDE, {"dp": 8, **FULL, "use_orig_params": True}, (3,)),
        (WIDE, {"dp": 8, **FULL, "micro_batch": 4}, (0,)),
        (WIDE, {"dp": 8, **FULL, "zero": 2}, (0,)),
        (WIDE, {"dp": 8, **FULL, "zero": 2, "use_orig_params": True}, (7,)),
        (WIDE, {"dp": 8, "zero": 2}, (1,)),
        (WIDE, {"dp": 8, "precision": "fp32", **FULL}, (0,)),
        (WIDE, {"dp": 8, "precision": "bf16", **FULL, "use_orig_params": True}, (0,)),
        (WIDE, {"dp": 8, "precision": "bf16-reduce-fp32", **FULL}, (0,)),
        (WIDE, {"dp": 8, "precision": "bf16-mixed-reduce-bf16", **FULL}, (0,)),
        (WIDE, {"dp": 64, "precision": "bf16-mixed-reduce-bf16", "use_orig_params": True}, (5,)),
        (WIDE, {"dp": 8, **FULL, "backward_prefetch": "post"}, (0,)),
        (WIDE, {"dp": 8, **FULL, "backward_prefetch": "none", "use_orig_params": True}, (0,)),
        (WIDE, {"dp": 8, **FULL, "forward_prefetch": True}, (0,)),
        (WIDE, {"dp": 8, "forward_prefetch": True, "use_orig_params": True}, (0,)),
        (WIDE, {"dp": 8, **FULL, "no_sync": True, "global_batch": 32}, (0,)),
        (WIDE, {"dp": 8, **FULL, "no_sync": True, "global_batch": 32, "zero": 2}, (0,)),
        (WIDE, {"dp": 8, **FULL, "global_batch": 32, "use_orig_params": True}, (0,)),
        (WIDE, {"dp": 8, **FULL, "clip_grad_norm": 1.0}, (0,)),
        (WIDE, {"dp": 8, **FULL, "clip_grad_norm": 1.0, "use_orig_params": True}, (7,)),
        (WIDE, {"dp": 8, **FULL, "optimizer_impl": "fused"}, (0,)),
        (WIDE, {"dp": 8, **FULL, "optimizer": "sgd-momentum", "use_orig_params": True}, (0,)),
        (WIDE, {"dp": 8, **FULL, "set_to_none": False}, (0,)),
        (WIDE, {"dp": 64, "recompute": "selective"}, (63,)),
        (WIDE, {"dp": 64, **FULL, "use_orig_params": True}, (31,)),
        (WIDE, {"dp": 256, **FULL}, (255,)),
        (WIDE, {"dp": 256, "use_orig_params": True, "precision": "bf16"}, (100,)),
        (WIDE, {"dp": 8, "dp_replicate": 8, **FULL}, (0,)),
        (WIDE, {"dp": 8, "dp_replicate": 8, **FULL, "zero": 2, "use_orig_params": True}, (0,)),
        (WIDE, {"dp": 32, "dp_replicate": 8, "precision": "bf16", **FULL}, (255,)),
        (WIDE, {"dp": 7, **FULL, "fsdp_units": "model"}, (0,)),
        (LARGE, {"dp": 64, **FULL}, (0,)),
        (LARGE, {"dp": 64, **FULL, "use_orig_params": True}, (63,)),
        (LARGE, {"dp": 256, **FULL}, (0, 255)),
        (LARGE, {"dp": 256, **FULL, "zero": 2, "precision": "bf16"}, (17,)),
        (LARGE, {"dp": 64, "dp_replicate": 4, **FULL, "backward_prefetch": "post"}, (0,)),
        (GPT3, {"dp": 64, **FULL}, (0,)),
        (GPT3, {"dp": 256, **FULL, "use_orig_params": True, "clip_grad_norm": 1.0}, (255,)),
        (GPT3, {"dp": 256, "precision": "bf16", **FULL, "forward_prefetch": True}, (3,)),
        (runnable("gpt2-xl"), {"dp": 8, "seq_len": 1024, "micro_batch": 4}, (0,)),
        (WIDE, {"dp": 8, **FULL, "precision": "fp16-mixed"}, (0,)),
        (WIDE, {"dp": 64, **FULL, "offload": True}, (0,)),
        (WIDE, {"dp": 64, **FULL, "offload": True, "use_orig_params": True, "zero": 2}, (63,)),
        (WIDE, {"dp": 64, **FULL, "offload": True, "precision": "bf16"}, (5,)),
        (WIDE, {"dp": 64, **FULL, "offload": True, "precision": "bf16", "use_orig_params": True}, (0,)),
        (WIDE, {"dp": 64, "offload": True, "precision": "bf16", "use_orig_params": True, "zero": 2}, (0,)),
        (
            WIDE,
            {
                "dp": 64,
                **FULL,
                "offload": True,
                "precision": "bf16",
                "use_orig_params": True,
                "zero": 2,
                "no_sync": True,
                "global_batch": 192,
            },
            (0,),
        ),
        (WIDE, {"dp": 64, **FULL, "offload": True, "precision": "bf16", "backward_prefetch": "post"}, (0,)),
        (WIDE, {"dp": 64, **FULL, "offload": True, "no_sync": True, "global_batch": 256}, (1,)),
        (runnable("gpt2-xl"), {"dp": 8, "seq_len": 1024, "use_orig_params": True, "zero": 2}, (5,)),
        (replace(GPT2, tied_head=True, dropout=0.1), {"dp": 8, "seq_len": 1024, "micro_batch": 8}, (0,)),
    )
)
"""One rank of 7 to 256 under FSDP1."""

OFFLOADED: Final = {"offload_optimizer": "cpu", "offload_param": "cpu"}

UNTIED: Final = replace(runnable("gpt2-xl"), tied_head=False)
HPZ_4: Final = {"zero_hpz_partition_size": 4}

DEEPSPEED: Final[tuple[tuple[Decoder, dict[str, Any], Sequence[int]], ...]] = tuple(
    (model, {"engine": "deepspeed", **options}, ranks)
    for model, options, ranks in (
        (WIDE, {"dp": 8, **FULL}, (0,)),
        (WIDE, {"dp": 8, "zero": 1, **FULL}, (0, 7)),
        (WIDE, {"dp": 8, "zero": 2, **FULL}, (0, 3)),
        (WIDE, {"dp": 8, "zero": 1, **FULL, "overlap_comm": True}, (0,)),
        (WIDE, {"dp": 8, "zero": 2, **FULL, "overlap_comm": True}, (0, 7)),
        (WIDE, {"dp": 8, "zero": 1}, (0,)),
        (WIDE, {"dp": 8, "zero": 2, "recompute": "selective"}, (1,)),
        (WIDE, {"dp": 8, "zero": 1, **FULL, "recompute_blocks": 2}, (0,)),
        (WIDE, {"dp": 8, **FULL, "global_batch": 16}, (0,)),
        (WIDE, {"dp": 8, "zero": 1, **FULL, "global_batch": 24}, (0,)),
        (WIDE, {"dp": 8, "zero": 1, **FULL, "global_batch": 24, "overlap_comm": True}, (0,)),
        (WIDE, {"dp": 8, "zero": 2, **FULL, "global_batch": 16}, (0,)),
        (WIDE, {"dp": 8, "zero": 2, **FULL, "global_batch": 32, "overlap_comm": True}, (5,)),
        (WIDE, {"dp": 8, "zero": 1, **FULL, "clip_grad_norm": 1.0}, (0,)),
        (WIDE, {"dp": 8, "zero": 2, **FULL, "clip_grad_norm": 1.0, "micro_batch": 2}, (0,)),
        (WIDE, {"dp": 8, **FULL, "clip_grad_norm": 1.0, "seq_len": 1024}, (0,)),
        (WIDE, {"dp": 8, **FULL, "precision": "fp16-mixed"}, (0,)),
        (WIDE, {"dp": 8, "zero": 1, **FULL, "precision": "fp16-mixed"}, (0,)),
        (WIDE, {"dp": 8, "zero": 2, **FULL, "precision": "fp16-mixed", "clip_grad_norm": 1.0}, (0,)),
        (WIDE, {"dp": 8, "zero": 2, **FULL, "reduce_bucket_size": 50_000_000}, (0,)),
        (WIDE, {"dp": 8, "zero": 1, **FULL, "reduce_bucket_size": 200_000_000, "overlap_comm": True}, (2,)),
        (WIDE, {"dp": 8, "zero": 2, **FULL, "reduce_bucket_size": 2_000_000_000, "seq_len": 512}, (0,)),
        (WIDE, {"dp": 8, "zero": 1, **FULL, "optimizer": "adam", "loss_chunks": 8}, (0,)),
        (WIDE, {"dp": 7, "zero": 2, **FULL}, (6,)),
        (WIDE, {"dp": 64, "zero": 1, **FULL}, (0, 63)),
        (WIDE, {"dp": 64, "zero": 2, **FULL}, (0, 31)),
        (WIDE, {"dp": 64, "zero": 2, **FULL, "overlap_comm": True, "global_batch": 128}, (0,)),
        (WIDE, {"dp": 64, "zero": 1, "clip_grad_norm": 1.0}, (17,)),
        (WIDE, {"dp": 256, "zero": 1, **FULL}, (255,)),
        (WIDE, {"dp": 256, "zero": 2, **FULL, "precision": "fp16-mixed"}, (100,)),
        (LARGE, {"dp": 64, "zero": 1, **FULL}, (0,)),
        (replace(LARGE, n_layers=18), {"dp": 64, "zero": 2, **FULL}, (63,)),
        (replace(LARGE, n_layers=18), {"dp": 256, "zero": 2, **FULL, "overlap_comm": True}, (0,)),
        (LARGE, {"dp": 256, "zero": 1, **FULL, "clip_grad_norm": 1.0, "global_batch": 512}, (128,)),
        (replace(GPT3, n_layers=8), {"dp": 64, "zero": 2, **FULL}, (0,)),
        (GPT3, {"dp": 256, "zero": 1, **FULL}, (255,)),
        (WIDE, {"dp": 8, "zero": 3, **FULL}, (0, 7)),
        (WIDE, {"dp": 8, "zero": 3}, (0,)),
        (WIDE, {"dp": 8, "zero": 3, **FULL, "overlap_comm": False}, (0,)),
        (WIDE, {"dp": 8, "zero": 3, **FULL, "global_batch": 24}, (0,)),
        (WIDE, {"dp": 8, "zero": 3, **FULL, "clip_grad_norm": 1.0, "micro_batch": 2}, (3,)),
        (WIDE, {"dp": 8, "zero": 3, **FULL, "precision": "fp16-mixed"}, (0,)),
        (WIDE, {"dp": 7, "zero": 3, **FULL}, (6,)),
        (WIDE, {"dp": 64, "zero": 3, **FULL}, (0, 63)),
        (WIDE, {"dp": 256, "zero": 3, "recompute": "full", "recompute_blocks": 16}, (100,)),
        (WIDE, {"dp": 8, "zero": 3, **FULL, "stage3_prefetch_bucket_size": 200_000_000}, (0,)),
        (WIDE, {"dp": 8, "zero": 3, **FULL, "stage3_prefetch_bucket_size": 0}, (0,)),
        (WIDE, {"dp": 8, "zero": 3, **FULL, "stage3_max_reuse_distance": 0}, (0,)),
        (WIDE, {"dp": 8, "zero": 3, **FULL, "stage3_param_persistence_threshold": 5_000_000}, (0,)),
        (WIDE, {"dp": 8, "zero": 3, **FULL, "stage3_max_live_parameters": 100_000_000}, (0,)),
        (WIDE, {"dp": 8, "zero": 3, **FULL, "sub_group_size": 100_000_000}, (0,)),
        (WIDE, {"dp": 8, "zero": 3, **FULL, "reduce_bucket_size": 50_000_000}, (0,)),
        (replace(WIDE, n_layers=4), {"dp": 8, "zero": 3, **FULL, "offload_optimizer": "cpu"}, (0,)),
        (WIDE, {"dp": 64, "zero": 3, **FULL, **OFFLOADED, "global_batch": 192}, (63,)),
        (WIDE, {"dp": 64, "zero": 3, **OFFLOADED, "overlap_comm": False, "clip_grad_norm": 1.0}, (0,)),
        (WIDE, {"dp": 64, "zero": 3, **FULL, **OFFLOADED, "precision": "fp16-mixed"}, (5,)),
        (WIDE, {"dp": 64, "zero": 3, **FULL, **OFFLOADED, "stage3_prefetch_bucket_size": 0}, (0,)),
        (WIDE, {"dp": 64, "zero": 3, **FULL, **OFFLOADED, "sub_group_size": 10_000_000}, (0,)),
        (WIDE, {"dp": 16, "zero": 3, **FULL, "zero_hpz_partition_size": 8}, (0, 11)),
        (WIDE, {"dp": 8, "zero": 3, **FULL, "zero_hpz_partition_size": 2, "global_batch": 24}, (3,)),
        (WIDE, {"dp": 64, "zero": 3, "zero_hpz_partition_size": 8, "precision": "fp16-mixed"}, (63,)),
        (WIDE, {"dp": 8, "zero": 3, **FULL, "zero_hpz_partition_size": 8, "overlap_comm": False}, (0,)),
        (WIDE, {"dp": 64, "zero": 3, "zero_hpz_partition_size": 8, "stage3_max_reuse_distance": 0}, (5,)),
        (LARGE, {"dp": 64, "zero": 3, **FULL}, (0,)),
        (LARGE, {"dp": 256, "zero": 3, **FULL, "global_batch": 512}, (255,)),
        (GPT3, {"dp": 256, "zero": 3, **FULL}, (17,)),
        (runnable("gpt2-xl"), {"dp": 8, "zero": 0, "seq_len": 1024, **FULL}, (0,)),
        (runnable("gpt2-xl"), {"dp": 8, "zero": 1, "seq_len": 1024, **FULL}, (0,)),
        (runnable("gpt2-xl"), {"dp": 8, "zero": 2, "seq_len": 1024, "micro_batch": 2}, (7,)),
        (runnable("gpt2-xl"), {"dp": 64, "zero": 2, "seq_len": 1024, "precision": "fp16-mixed"}, (1,)),
        (UNTIED, {"dp": 16, "zero": 3, "seq_len": 1024, **FULL, **HPZ_4}, (0,)),
        (UNTIED, {"dp": 8, "zero": 3, "seq_len": 1024, "global_batch": 16}, (7,)),
        (UNTIED, {"dp": 8, "zero": 3, "seq_len": 1024, "global_batch": 16, **HPZ_4}, (7,)),
    )
)
"""One rank of 7 to 256 under DeepSpeed's ZeRO-0 to 3; `initialize` holds all weights twice."""

DEEPSPEED_PIPELINES: Final[tuple[tuple[Decoder, dict[str, Any], Sequence[int]], ...]] = tuple(
    (model, {"engine": "deepspeed", "pp": pp, **options}, ranks)
    for pp, model, options, ranks in (
        (2, WIDE, {"global_batch": 4, **FULL}, (0, 1)),
        (2, WIDE, {"global_batch": 4, "zero": 1, "seq_len": 1024}, (0, 1)),
        (2, WIDE, {"dp": 2, "global_batch": 8, "zero": 1, "seq_len": 1024}, (0, 3)),
        (2, WIDE, {"dp": 4, "global_batch": 32, "zero": 1, "clip_grad_norm": 1.0}, (0, 7)),
        (4, WIDE, {"global_batch": 8}, (0, 1, 3)),
        (4, WIDE, {"dp": 2, "global_batch": 16, **FULL}, (0, 5, 7)),
        (4, WIDE, {"dp": 4, "global_batch": 64, "zero": 1, "micro_batch": 2, **FULL}, (0, 7, 15)),
        (4, WIDE, {"global_batch": 8, "precision": "fp16-mixed"}, (0, 2, 3)),
        (4, WIDE, {"dp": 2, "global_batch": 16, "zero": 1, "precision": "fp16-mixed", **FULL}, (1, 6)),
        (8, WIDE, {"global_batch": 32, "clip_grad_norm": 1.0}, (0, 4, 7)),
        (8, WIDE, {"dp": 8, "global_batch": 128, "zero": 1}, (0, 31, 63)),
        (8, LARGE, {"dp": 8, "global_batch": 128, "zero": 1, **FULL}, (0, 31, 63)),
        (4, WIDE, {"dp": 2, "global_batch": 2, **FULL}, (0, 7)),
        (4, WIDE, {"global_batch": 2, "partition_method": "uniform"}, (0, 3)),
        (4, WIDE, {"global_batch": 8, "partition_method": "type:block", "recompute": "selective"}, (1, 3)),
        (4, WIDE, {"global_batch": 8, "activation_checkpoint_interval": 1}, (0, 1, 3)),
        (4, WIDE, {"dp": 2, "global_batch": 16, "zero": 1, "activation_checkpoint_interval": 2}, (0, 4, 7)),
        (2, UNTIED, {"seq_len": 1024, "global_batch": 8}, (0, 1)),
        (4, UNTIED, {"dp": 2, "seq_len": 1024, "global_batch": 64, "micro_batch": 4, "zero": 1}, (0, 3, 6)),
        (8, UNTIED, {"seq_len": 1024, "global_batch": 32, "micro_batch": 2, **FULL}, (0, 3, 7)),
    )
)
"""One rank of a pipeline of DeepSpeed's: of its first, a middle or its last stage."""

LLAMA, QWEN, GPT_OF_HF, TIED = (
    implemented(resolve(name), "huggingface") for name in ("llama-3-8b", "qwen3-8b", "gpt2", "qwen2.5-0.5b")
)

DEEPSPEED_OF_TRANSFORMERS: Final[tuple[tuple[Model, dict[str, Any], int], ...]] = (
    (LLAMA, {"dp": 8, "zero": 1, **FULL}, 0),
    (LLAMA, {"dp": 8, "zero": 2, **FULL, "overlap_comm": True}, 7),
    (LLAMA, {"dp": 64, "zero": 2, "seq_len": 2048}, 31),
    (LLAMA, {"dp": 8, "zero": 3, **FULL}, 0),
    (LLAMA, {"dp": 64, "zero": 3}, 63),
    (LLAMA, {"dp": 64, "zero": 3, **FULL, "overlap_comm": False, "micro_batch": 2}, 0),
    (LLAMA, {"dp": 256, "zero": 3, **FULL, "global_batch": 768, "clip_grad_norm": 1.0}, 100),
    (LLAMA, {"dp": 8, "zero": 3, "recompute": "full", "recompute_blocks": 16}, 5),
    (LLAMA, {"dp": 8, "zero": 3, **FULL, "stage3_max_reuse_distance": 0}, 0),
    (LLAMA, {"dp": 16, "zero": 3, **FULL, "zero_hpz_partition_size": 8}, 0),
    (LLAMA, {"dp": 64, "zero": 3, "zero_hpz_partition_size": 8, "global_batch": 128}, 63),
    (LLAMA, {"dp": 8, "zero": 3, **FULL, "stage3_prefetch_bucket_size": 200_000_000}, 0),
    (LLAMA, {"dp": 7, "zero": 3, **FULL, "stage3_param_persistence_threshold": 5_000_000}, 6),
    (QWEN, {"dp": 8, "zero": 1, **FULL, "overlap_comm": True}, 0),
    (QWEN, {"dp": 8, "zero": 2, **FULL, "clip_grad_norm": 1.0}, 3),
    (QWEN, {"dp": 8, "zero": 3, **FULL}, 0),
    (QWEN, {"dp": 64, "zero": 3}, 17),
    (QWEN, {"dp": 256, "zero": 3, **FULL, "global_batch": 512}, 255),
    (GPT_OF_HF, {"dp": 8, "seq_len": 1024}, 0),
    (GPT_OF_HF, {"dp": 8, "zero": 1, "seq_len": 1024, "micro_batch": 8}, 7),
    (GPT_OF_HF, {"dp": 8, "zero": 2, "seq_len": 1024, "global_batch": 24, **FULL}, 0),
    (GPT_OF_HF, {"dp": 8, "zero": 3, "seq_len": 1024, "micro_batch": 8}, 0),
    (GPT_OF_HF, {"dp": 64, "zero": 3, "seq_len": 1024, "global_batch": 192, **FULL}, 63),
    (GPT_OF_HF, {"dp": 8, "zero": 3, "seq_len": 1024, "stage3_max_reuse_distance": 0}, 1),
    (GPT_OF_HF, {"dp": 16, "zero": 3, "seq_len": 1024, "micro_batch": 4, "zero_hpz_partition_size": 4}, 9),
    (TIED, {"dp": 8, "zero": 3, **FULL, "zero_hpz_partition_size": 4, "offload_optimizer": "cpu"}, 0),
    (TIED, {"dp": 8, "zero": 2}, 0),
    (TIED, {"dp": 8, "zero": 3, **FULL, "recompute_blocks": 8, "precision": "fp16-mixed"}, 0),
    (TIED, {"dp": 256, "zero": 3, "micro_batch": 2}, 200),
    (LLAMA, {"dp": 64, "zero": 3, **FULL, **OFFLOADED}, 0),
    (LLAMA, {"dp": 256, "zero": 3, **FULL, "offload_optimizer": "cpu-pinned", "global_batch": 768}, 255),
    (QWEN, {"dp": 64, "zero": 3, **OFFLOADED, "clip_grad_norm": 1.0, "global_batch": 128}, 63),
    (GPT_OF_HF, {"dp": 8, "zero": 3, "seq_len": 1024, **OFFLOADED, "reduce_bucket_size": 5_000_000}, 7),
    (TIED, {"dp": 8, "zero": 3, **FULL, "offload_optimizer": "cpu", "precision": "fp16-mixed"}, 0),
    (LLAMA, {"dp": 64, "zero": 2, **FULL, "offload_optimizer": "cpu"}, 0),
    (LLAMA, {"dp": 256, "zero": 1, **FULL, "offload_optimizer": "cpu-pinned", "overlap_comm": True}, 255),
    (
        implemented(replace(runnable("llama-3-8b"), n_layers=4), "huggingface"),
        {"dp": 8, "zero": 1, **FULL, "offload_optimizer": "cpu", "seq_len": 512},
        0,
    ),
    (TIED, {"dp": 8, "zero": 1, "offload_optimizer": "cpu"}, 0),
    (TIED, {"dp": 8, "zero": 2, "global_batch": 24, "offload_optimizer": "cpu-pinned"}, 3),
    (TIED, {"dp": 64, "zero": 2, **FULL, "precision": "fp16-mixed", "offload_optimizer": "cpu"}, 63),
)
"""One rank of 7 to 256, with transformers' own modules whole; two of the models have tied ends."""

ULYSSES: Final[tuple[tuple[Model, dict[str, Any], int], ...]] = (
    (LLAMA, {"dp": 2, "cp": 4, "zero": 3, **FULL, "seq_len": 32_768}, 0),
    (LLAMA, {"dp": 2, "cp": 4, "zero": 3, **FULL, "seq_len": 32_768}, 5),
    (LLAMA, {"dp": 1, "cp": 8, "zero": 3, **FULL, "seq_len": 131_072}, 7),
    (LLAMA, {"dp": 8, "cp": 8, "zero": 2, **FULL, "seq_len": 65_536}, 0),
    (LLAMA, {"dp": 4, "cp": 2, "zero": 1, "seq_len": 8192}, 3),
    (LLAMA, {"dp": 4, "cp": 4, "zero": 1, **FULL, "seq_len": 16_384, "overlap_comm": True}, 15),
    (LLAMA, {"dp": 2, "cp": 4, "zero": 3, **FULL, "seq_len": 16_384, "overlap_comm": False}, 2),
    (
        QWEN,
        {"dp": 4, "cp": 8, "zero": 3, **FULL, "seq_len": 65_536, "global_batch": 8, "clip_grad_norm": 1.0},
        9,
    ),
    (QWEN, {"dp": 4, "cp": 16, "zero": 2, **FULL, "seq_len": 32_768, "micro_batch": 2}, 33),
    (QWEN, {"dp": 32, "cp": 8, "zero": 3, **FULL, "seq_len": 65_536}, 255),
    (TIED, {"dp": 4, "cp": 2, "zero": 0, "seq_len": 8192}, 0),
    (TIED, {"dp": 4, "cp": 2, "zero": 0, "seq_len": 4096, "micro_batch": 2, **FULL}, 7),
    (TIED, {"dp": 8, "cp": 2, "zero": 3, "seq_len": 8192, "offload_optimizer": "cpu"}, 3),
    (TIED, {"dp": 4, "cp": 2, "zero": 2, "seq_len": 8192, "precision": "fp16-mixed", "global_batch": 8}, 6),
)
"""One rank of 8 to 256, whose sequences DeepSpeed's Ulysses divides."""

AUTOTP: Final[tuple[tuple[Model, dict[str, Any], int], ...]] = (
    (LLAMA, {"dp": 4, "tp": 2, "zero": 1, **FULL}, 0),
    (LLAMA, {"dp": 4, "tp": 2, "zero": 2, **FULL}, 7),
    (LLAMA, {"dp": 2, "tp": 4, "zero": 0, **FULL}, 3),
    (LLAMA, {"dp": 8, "tp": 8, "zero": 1, **FULL, "seq_len": 8192, "micro_batch": 2}, 9),
    (LLAMA, {"dp": 8, "tp": 8, "zero": 2, "seq_len": 8192}, 63),
    (
        LLAMA,
        {"dp": 16, "tp": 4, "zero": 2, **FULL, "seq_len": 8192, "global_batch": 64, "clip_grad_norm": 1.0},
        33,
    ),
    (LLAMA, {"dp": 1, "tp": 8, "zero": 2, **FULL}, 7),
    (LLAMA, {"dp": 8, "tp": 8, "zero": 1, **FULL, "offload_optimizer": "cpu-pinned"}, 17),
    (QWEN, {"dp": 4, "tp": 8, "zero": 2, **FULL, "precision": "fp16-mixed"}, 0),
    (QWEN, {"dp": 4, "tp": 4, "zero": 1, **FULL, "overlap_comm": True}, 13),
    (QWEN, {"dp": 2, "tp": 8, "zero": 0, "seq_len": 2048}, 6),
    (QWEN, {"dp": 8, "tp": 4, "zero": 1, **FULL, "precision": "fp16-mixed", "global_batch": 16}, 11),
    (
        QWEN,
        {"dp": 4, "tp": 2, "zero": 2, **FULL, "overlap_comm": True, "reduce_bucket_size": 10**8},
        1,
    ),
    (TIED, {"dp": 4, "tp": 2, "zero": 0, "precision": "fp16-mixed"}, 5),
    (TIED, {"dp": 8, "tp": 2, "zero": 2, **FULL, "micro_batch": 4}, 15),
    (TIED, {"dp": 8, "tp": 2, "zero": 1, "global_batch": 32}, 8),
    (TIED, {"dp": 8, "tp": 2, "zero": 2, "offload_optimizer": "cpu"}, 3),
    (TIED, {"dp": 1, "tp": 2, "zero": 1}, 0),
)
"""One rank of 2 to 64, over whose tensor-parallel ones DeepSpeed's AutoTP divides linears."""


def gpu_deepspeed(gpus: Gpus | None) -> tuple[Case, ...]:
    """One rank of a world under DeepSpeed with stand-ins for the others; as many layers as fit one GPU."""
    rows = *DEEPSPEED, *DEEPSPEED_PIPELINES
    own = [case for model, options, ranks in rows for case in _stand_ins(model, options, ranks, gpus)]
    return *own, *(_of_transformers(*row, gpus) for row in (*DEEPSPEED_OF_TRANSFORMERS, *ULYSSES, *AUTOTP))


def _of_transformers(model: Model, options: dict[str, Any], rank: int, gpus: Gpus | None) -> Case:
    plan = _plan({"seq_len": 4096, "engine": "deepspeed"} | options)
    whole = cast(Decoder, model)
    if gpus is None:
        found = _on_cpu(narrow(whole, n_layers=3), in_short(plan), backend="fake", rank=rank)
    else:
        backend: Backend = "nccl" if gpus.device == "nogpu" else "fake"
        found = _on_gpu(whole, plan, gpus, backend=backend, rank=rank)
    return replace(found, name=f"{found.name} (transformers), rank {rank}")


ALLOC_CONFS: Final = ("expandable_segments:True", "max_split_size_mb:32", "garbage_collection_threshold:0.9")
"""Settings of `PYTORCH_CUDA_ALLOC_CONF`."""


def gpu_fsdp1(gpus: Gpus | None) -> tuple[Case, ...]:
    """One rank of a world under FSDP1 with stand-ins for the others; as many layers as fit one GPU."""
    return tuple(case for model, options, ranks in FSDP1 for case in _stand_ins(model, options, ranks, gpus))


def gpu_allocator(gpus: Gpus | None) -> tuple[Case, ...]:
    """The cases of `gpu-single` and twelve stand-ins with other settings of CUDA's allocator.

    Each may hold as much as it reserves without them: garbage is collected in the last tenth of that.
    """
    sharded = [case for case in gpu_standin(gpus) if case.plan.fsdp and case.plan.tp == 1][:12]
    cases = [*gpu_single(gpus), *sharded]
    if gpus is None:
        return tuple(cases)
    return tuple(
        replace(
            case,
            name=f"{case.name}, {conf}",
            plan=with_said(case.plan, alloc_conf=conf),
            limit_bytes=_reserved_bytes(case) if conf.startswith("garbage") else None,
        )
        for conf in ALLOC_CONFS
        for case in cases
    )


def _reserved_bytes(case: Case) -> int | None:
    replay = estimated_rank(case, case.ranks[0]).replayed
    return None if replay is None else replay.reserved_bytes


def gpu_published(gpus: Gpus | None) -> tuple[Case, ...]:
    """What torchtitan ran on H100, eager, and published: the first rank, with expandable segments."""
    found = []
    for row in read_rows(ROWS):
        known = compared(row)
        if by_torchtitan(row) and "H100" in row["gpu"] and known.error is not None and not known.differences:
            estimated = comparable_estimate(row)
            model, plan = estimated.model, estimated.plan
            if gpus is None and isinstance(model, Decoder):
                model, plan = narrow(model), in_short(plan)
            name = f"{row['row_id']}, {known.plan}"
            found.append(Case(name=name, model=runnable(model), plan=plan, backend="fake", rank=0))
    return tuple(found if gpus is None else (_published(case, gpus) for case in found))


def _published(case: Case, gpus: Gpus) -> Case:
    placed = replace(case, device=gpus.device, gpu=gpus.known_as)
    return replace(placed, steps=UNTIMED_STEPS, timeout_s=PATIENCE_S)


GPU_SUITES: Final[dict[str, Callable[[Gpus | None], tuple[Case, ...]]]] = {
    "gpu-single": gpu_single,
    "gpu-standin": gpu_standin,
    "gpu-shared": gpu_shared,
    "gpu-nccl": gpu_nccl,
    "gpu-allocator": gpu_allocator,
    "gpu-fsdp1": gpu_fsdp1,
    "gpu-deepspeed": gpu_deepspeed,
    "gpu-fairscale": gpu_fairscale,
    "gpu-colossalai": gpu_colossalai,
    "gpu-published": gpu_published,
    "gpu-wild": gpu_wild,
    "gpu-divided": gpu_divided,
    "gpu-torchtitan": gpu_torchtitan,
    "gpu-adapters": gpu_adapters,
    "gpu-compiled": gpu_compiled,
    "gpu-float8": gpu_float8,
    "gpu-no-sync": gpu_no_sync,
    "gpu-offloading": gpu_offloading,
    "gpu-losses": gpu_losses,
    "gpu-optimizers": gpu_optimizers,
    "gpu-families": gpu_families,
    "gpu-trainers": gpu_trainers,
    "gpu-trl": gpu_trl,
}

PATIENCE_S: Final = 600.0
"""Until a rank without a GPU is ended: a hundred layers take a minute on a core of their own."""

USABLE: Final = 0.85
"""The part of a GPU's memory that a plan may be predicted to allocate: the rest is CUDA's, and fragments."""


def _cases(
    rows: Sequence[Row],
    gpus: Gpus | None,
    *,
    small: Callable[[Decoder], Decoder] | None = None,
    backend: Backend = "gloo",
) -> Iterator[Case]:
    for model, options in rows:
        plan = _plan(options)
        if gpus is None:
            yield _on_cpu((small or smallest)(model), in_short(plan))
        else:
            fitting = with_layers_that_fit(model, plan, gpus, backend)
            yield _on_gpu(fitting, plan, gpus, backend=backend)


def _stand_ins(
    model: Decoder, options: dict[str, Any], ranks: Sequence[int], gpus: Gpus | None
) -> Iterator[Case]:
    plan = _plan({"seq_len": 4096} | options)
    if gpus is None:
        small = narrow(model, n_layers=max(3, plan.n_stages + 1))
        cases = [_on_cpu(small, in_short(plan), backend="fake", rank=rank) for rank in ranks]
    else:
        backend: Backend = "nccl" if gpus.device == "nogpu" else "fake"
        fitting = with_layers_that_fit(model, plan, replace(gpus, n=plan.world_size), backend)
        cases = [_on_gpu(fitting, plan, gpus, backend=backend, rank=rank) for rank in ranks]
    yield from (replace(case, name=f"{case.name}, rank {case.rank}") for case in cases)


def _plan(options: dict[str, Any]) -> Plan:
    return plan_of(**{"seq_len": 1024} | options)


def _on_cpu(model: Decoder, plan: Plan, **settings: Any) -> Case:
    return Case(name=_name(model, plan), model=model, plan=plan, **settings)


def _on_gpu(model: Decoder, plan: Plan, gpus: Gpus, **settings: Any) -> Case:
    in_short = gpus.device == "nogpu" and "rank" in settings
    steps = UNTIMED_STEPS if in_short else GPU_STEPS
    case = Case(name=_name(model, plan), model=model, plan=plan, steps=steps, **settings)
    patience_s = PATIENCE_S if gpus.device == "nogpu" else case.timeout_s
    return replace(case, device=gpus.device, gpu=gpus.known_as, timeout_s=patience_s)


def _name(model: Decoder, plan: Plan) -> str:
    return f"{title(model, plan)}, {model.n_layers} layers, {plan.n_micro_batches} x {plan.seq_len}"


def with_layers_that_fit(model: Decoder, plan: Plan, gpus: Gpus, backend: Backend) -> Decoder:
    """The model with as many layers to a pipeline stage as fit one of the GPUs, and no more than it has."""
    usable_bytes = int(USABLE * gpus.memory_bytes / max(1, plan.world_size // gpus.n))
    kernels = gpu(gpus.known_as).device

    def fits(n_blocks: int) -> bool:
        cut = replace(model, n_layers=n_blocks * plan.n_stages)
        ends = (plan.place(rank) for rank in {0, plan.world_size - 1})
        return all(rank_estimate(cut, plan, at, kernels, backend).peak_bytes <= usable_bytes for at in ends)

    least, most = 1, -(-model.n_layers // plan.n_stages)
    while least < most:
        half = (least + most + 1) // 2
        least, most = (half, most) if fits(half) else (least, half - 1)
    return replace(model, n_layers=min(model.n_layers, least * plan.n_stages))


def smallest(model: Decoder) -> Decoder:
    """The model in small."""
    return replace(in_small(model), max_seq_len=LONGEST)


LONGEST: Final = 512
"""The most tokens of a sequence in the smallest form."""


def in_short(plan: Plan) -> Plan:
    """The plan with sequences of a 64th."""
    return replace(plan, seq_len=plan.seq_len // 64)


def narrow(model: Decoder, n_layers: int = 4) -> Decoder:
    """The model in small with heads for eight ranks: up to eight query heads to a key head, the same ratios.

    >>> narrow(runnable("llama-3-70b"), n_layers=5).n_heads
    64
    """
    n_heads = 8 * min(8, model.n_heads // model.n_kv_heads)
    d_model = 8 * n_heads
    return replace(
        model,
        name=f"{model.name} in small",
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=8,
        d_head=8,
        d_ff=model.d_ff * d_model // model.d_model // 8 * 8,
        vocab_size=512,
        max_seq_len=LONGEST,
        tied_head=False,
    )
