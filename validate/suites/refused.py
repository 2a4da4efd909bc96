"""Plans that PyTorch cannot run, and that memplan therefore refuses.

`sweep --anyway` runs these plans all the same, to hear PyTorch's own reason.
"""

from dataclasses import replace
from typing import Any

from memplan.engines.options import plan_of
from memplan.models import Decoder
from validate.cases import Case, title
from validate.suites.models import GPT_TIED, LLAMA


def refused() -> tuple[Case, ...]:
    """A plan for every rule by which memplan refuses what PyTorch would fail at."""
    zero_bubble: dict[str, Any] = {"pp": 2, "schedule": "zero-bubble", "virtual_stages": 2, "global_batch": 4}
    two_stages = zero_bubble | {"schedule": "interleaved-1f1b"}
    return (
        _case(replace(LLAMA, n_heads=6, n_kv_heads=6, d_model=96), tp=4),
        _case(replace(LLAMA, d_ff=341), tp=2),
        _case(LLAMA, tp=2, sequence_parallel=True, seq_len=65),
        _case(GPT_TIED, dp=2, tp=2),
        _case(GPT_TIED, dp=2, tp=2, zero=1),
        _case(GPT_TIED, dp=2, zero=3, fsdp_units="block+ends"),
        _case(LLAMA, pp=2, global_batch=1),
        _case(LLAMA, **zero_bubble, dp=2),
        _case(LLAMA, **zero_bubble, dp=2, zero=1),
        _case(LLAMA, **two_stages | {"global_batch": 5}),
        _case(LLAMA, **zero_bubble | {"global_batch": 5}),
        _case(LLAMA, **zero_bubble | {"schedule": "dualpipe-v", "global_batch": 2}),
        _case(replace(LLAMA, n_layers=6), **zero_bubble | {"schedule": "zbv", "virtual_stages": 3}),
        _case(LLAMA, **zero_bubble, dp=2, zero=3),
        _case(LLAMA, **zero_bubble, recompute="selective"),
        _case(LLAMA, dp=2, zero=3, optimizer="sgd", optimizer_impl="fused"),
        _case(LLAMA, tp=2, optimizer="sgd-momentum", optimizer_impl="fused"),
        _case(LLAMA, tp=2, optimizer_impl="foreach", set_to_none=False),
    )


def _case(model: Decoder, **asked: Any) -> Case:
    settings: dict[str, Any] = {"precision": "fp32", "seq_len": 64} | asked
    if "global_batch" in settings:
        settings["global_batch"] *= settings.get("dp", 1)
    plan = plan_of(**settings)
    return Case(name=f"{title(model, plan)}, {plan.n_micro_batches} x {plan.seq_len}", model=model, plan=plan)
