"""Large models at their true size, on CPU: PyTorch's own code on tensors without data (`validate.fake`).

A flat list of rows: a model, a plan, and which of its ranks run, each as one that stands in for all.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from memplan import Plan
from memplan.engines.options import plan_of
from memplan.models import Decoder
from validate.cases import FAKE_STEPS, Case, runnable, title
from validate.suites.gpu import FULL, GPT3, LARGE, LARGEST, SP8, WIDE

LONG: Final = replace(WIDE, max_seq_len=32_768)
GPT2_XL: Final = runnable("gpt2-xl")
TIED: Final = replace(WIDE, tied_head=True)

ROWS: Final[tuple[tuple[Decoder, dict[str, Any], Sequence[int]], ...]] = (
    # One rank: precisions, optimizers, recomputation, length.
    (GPT2_XL, {"seq_len": 1024, "micro_batch": 4}, (0,)),
    (WIDE, {"precision": "fp32"}, (0,)),
    (WIDE, {"precision": "bf16", "optimizer_impl": "fused"}, (0,)),
    (WIDE, {"precision": "fp16-mixed", "optimizer": "sgd-momentum", "set_to_none": False}, (0,)),
    (WIDE, {"recompute": "selective", "micro_batch": 2, "seq_len": 4096}, (0,)),
    (WIDE, {"optimizer_impl": "foreach", "clip_grad_norm": 1.0, **FULL, "recompute_blocks": 16}, (0,)),
    (LONG, {"precision": "bf16", "seq_len": 32_768, "loss_chunks": 8, **FULL}, (0,)),
    (TIED, {"optimizer": "adam", "seq_len": 4096, "global_batch": 4}, (0,)),
    (LARGE, {"precision": "bf16", "optimizer": "sgd", **FULL}, (0,)),
    # DDP and ZeRO-1.
    (GPT2_XL, {"dp": 64, "seq_len": 1024, "micro_batch": 4}, (63,)),
    (WIDE, {"dp": 8}, (0,)),
    (WIDE, {"dp": 1024, **FULL}, (1023,)),
    (WIDE, {"dp": 8, "gradient_as_bucket_view": True, "static_graph": True, "precision": "fp32"}, (4,)),
    (WIDE, {"dp": 8, "ddp_comm_hook": "bf16", "bucket_cap_bytes": 1 << 30, "global_batch": 16}, (0,)),
    (WIDE, {"dp": 64, "ddp_comm_hook": "powersgd", "precision": "fp32", "seq_len": 4096}, (63,)),
    (WIDE, {"dp": 8, "zero": 1}, (0, 7)),
    (TIED, {"dp": 64, "zero": 1, "optimizer": "sgd-momentum"}, (63,)),
    # FSDP2: ZeRO-2 and 3, its units, offload, hybrid sharding.
    (WIDE, {"dp": 8, "zero": 2}, (0,)),
    (WIDE, {"dp": 64, "zero": 3, "precision": "fp32"}, (63,)),
    (WIDE, {"dp": 8, "zero": 3, "precision": "fp32", **FULL}, (0,)),
    (WIDE, {"dp": 64, "zero": 3, "fsdp_units": "block+ends", "recompute": "selective"}, (1,)),
    (WIDE, {"dp": 64, "zero": 3, "fsdp_units": "model"}, (0,)),
    (WIDE, {"dp": 64, "zero": 3, "fsdp_blocks": 4, **FULL}, (63,)),
    (WIDE, {"dp": 8, "zero": 3, "micro_batch": 2, "seq_len": 4096, "global_batch": 64, **FULL}, (7,)),
    (WIDE, {"dp": 64, "zero": 3, "clip_grad_norm": 1.0, "optimizer_impl": "foreach"}, (0,)),
    (WIDE, {"dp": 64, "zero": 3, "offload": True, "precision": "bf16"}, (0,)),
    (LONG, {"dp": 512, "zero": 3, "seq_len": 32_768, **FULL}, (511,)),
    (TIED, {"dp": 64, "zero": 3, "precision": "fp16-mixed"}, (32,)),
    (GPT3, {"dp": 128, "zero": 3, "seq_len": 4096, **FULL}, (127,)),
    (LARGE, {"dp": 128, "zero": 3, "precision": "bf16", "recompute": "selective"}, (64,)),
    (LARGE, {"dp": 64, "dp_replicate": 16, "zero": 3, **FULL}, (1023,)),
    (LARGEST, {"dp": 64, "zero": 3, "global_batch": 256, **FULL}, (63,)),
    (WIDE, {"dp": 64, "dp_replicate": 16, "zero": 2}, (512,)),
    # Tensor parallelism.
    (WIDE, {"tp": 8}, (0,)),
    (WIDE, {**SP8, "precision": "fp32", "clip_grad_norm": 1.0}, (7,)),
    (LARGE, {"tp": 8, "recompute": "selective", "precision": "bf16"}, (3,)),
    (WIDE, {"dp": 16, "tp": 4, "zero": 1}, (63,)),
    (WIDE, {"dp": 128, "tp": 8}, (1023,)),
    (WIDE, {"dp": 8, **SP8, "zero": 2, "recompute": "selective"}, (0,)),
    (GPT3, {"dp": 64, **SP8, "zero": 3, "seq_len": 4096, **FULL}, (511,)),
    (LARGE, {"dp": 16, "dp_replicate": 8, **SP8, "zero": 3, **FULL}, (1023,)),
    (LARGEST, {"dp": 128, **SP8, "zero": 3, **FULL}, (0, 1023)),
    # Pipelines.
    (LARGE, {"pp": 4, "tp": 8, "global_batch": 8, **FULL}, (0, 31)),
    (LARGE, {"pp": 4, "dp": 4, **SP8, "zero": 1, "global_batch": 32, **FULL}, (0, 63, 127)),
    (LARGE, {"pp": 8, "dp": 2, **SP8, "schedule": "gpipe", "precision": "bf16"}, (0, 64)),
    (LARGE, {"pp": 8, **SP8, "schedule": "interleaved-1f1b", "virtual_stages": 2, **FULL}, (0, 63)),
    (LARGE, {"pp": 8, "dp": 2, "tp": 4, "schedule": "looped-bfs", "virtual_stages": 2, "zero": 2}, (63,)),
    (LARGE, {"pp": 8, **SP8, "schedule": "zero-bubble", "virtual_stages": 2}, (0, 63)),
    (LARGE, {"pp": 8, **SP8, "schedule": "zbv", "virtual_stages": 2}, (0, 32)),
    (LARGE, {"pp": 8, **SP8, "schedule": "dualpipe-v", "virtual_stages": 2, **FULL}, (0,)),
    (GPT3, {"pp": 8, "dp": 16, **SP8, "zero": 1, "seq_len": 4096, **FULL}, (0, 1023)),
    (LARGE, {"pp": 4, "dp": 32, **SP8, "zero": 3, **FULL}, (0, 1023)),
    (LARGEST, {"pp": 16, "dp": 8, **SP8, "zero": 1, **FULL}, (0, 512, 1023)),
    (LARGEST, {"pp": 16, "dp": 16, **SP8, "zero": 2, "recompute": "selective", "precision": "bf16"}, (2047,)),
)
"""Decoder, options of the plan, ranks; 8192 tokens unless said otherwise."""


def fullsize() -> tuple[Case, ...]:
    """One rank of 1 to 2,048, the shapes of 1.5B to 405B models, up to 32k tokens."""
    return tuple(
        _case(model, plan_of(**{"seq_len": 8192} | options), rank)
        for model, options, ranks in ROWS
        for rank in ranks
    )


def _case(model: Decoder, plan: Plan, rank: int) -> Case:
    batch = f"{plan.n_micro_batches} x {plan.seq_len}"
    return Case(
        name=f"{title(model, plan)}, {batch}, rank {rank}",
        model=model,
        plan=plan,
        steps=FAKE_STEPS,
        timeout_s=600.0,
        backend="fake",
        rank=rank,
        tensors="fake",
    )
