"""Every kind of plan once."""

from dataclasses import replace
from typing import Any

from memplan.engines.options import plan_of
from memplan.models import Decoder
from validate.cases import Case
from validate.suites.models import GPT, GPT_DROPOUT, GPT_TIED, LLAMA, LLAMA_ODD, LLAMA_TIED


def _case(name: str, model: Decoder, **plan: Any) -> Case:
    defaults: dict[str, Any] = {
        "global_batch": 2 * plan.get("dp", 1) if plan.get("tp", 1) > 1 and "pp" not in plan else 4,
        "seq_len": 128 if plan.get("precision", "fp32") == "fp32" else 64,
        "precision": "fp32",
        "optimizer": "adamw",
    }
    settings = defaults | plan
    return Case(name=f"{model.name}, {name}", model=model, plan=plan_of(**settings))


def quick() -> tuple[Case, ...]:
    """Every kind of plan on one to eight ranks, small enough for a laptop."""
    sp: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
    return (
        _case("one rank", LLAMA),
        _case("one rank, bf16", LLAMA, precision="bf16", global_batch=2),
        _case(
            "one rank, bf16-mixed, recompute", LLAMA, precision="bf16-mixed", recompute="full", global_batch=2
        ),
        _case("one rank, micro-batch 2 of 8, sgd", GPT, micro_batch=2, global_batch=8, optimizer="sgd"),
        _case("one rank, recompute, adam", GPT_TIED, recompute="full", optimizer="adam"),
        _case("one rank, dropout", GPT_DROPOUT),
        _case("dp2", LLAMA, dp=2),
        _case("dp2, long sequence", LLAMA, dp=2, global_batch=2, seq_len=256),
        _case("dp4, recompute", LLAMA, dp=4, recompute="full", global_batch=8, micro_batch=2),
        _case("dp2, bf16", GPT, dp=2, precision="bf16", optimizer="sgd-momentum"),
        _case("dp2, bf16-mixed", GPT, dp=2, precision="bf16-mixed"),
        _case("dp2, tied, sgd", GPT_TIED, dp=2, optimizer="sgd"),
        _case("dp2, dropout, recompute", GPT_DROPOUT, dp=2, recompute="full"),
        _case("dp2 zero1", LLAMA, dp=2, zero=1),
        _case("dp4 zero1, adam", GPT, dp=4, zero=1, optimizer="adam"),
        _case("dp3 zero1, odd", LLAMA_ODD, dp=3, zero=1, global_batch=3),
        _case("dp2 zero1, bf16-mixed", LLAMA, dp=2, zero=1, precision="bf16-mixed", optimizer="sgd-momentum"),
        _case("dp2 zero2", LLAMA, dp=2, zero=2),
        _case("dp4 zero2, recompute", GPT, dp=4, zero=2, recompute="full", global_batch=8),
        _case("dp2 zero2, bf16-mixed", LLAMA, dp=2, zero=2, precision="bf16-mixed"),
        _case("dp2 zero3", LLAMA, dp=2, zero=3),
        _case("dp2 zero3, recompute, bf16", LLAMA, dp=2, zero=3, recompute="full", precision="bf16"),
        _case("dp4 zero3, bf16-mixed", GPT, dp=4, zero=3, precision="bf16-mixed"),
        _case(
            "dp3 zero3, odd, sgd-momentum", LLAMA_ODD, dp=3, zero=3, global_batch=3, optimizer="sgd-momentum"
        ),
        _case("dp2 zero3, tied", LLAMA_TIED, dp=2, zero=3, optimizer="adam"),
        _case("tp2", LLAMA, tp=2),
        _case("tp4, recompute", GPT, tp=4, recompute="full"),
        _case("tp2, bf16-mixed", LLAMA, tp=2, precision="bf16-mixed", global_batch=2),
        _case("tp2 sp", LLAMA, **sp),
        _case("tp2 sp", GPT, **sp),
        _case("tp2 sp, recompute, bf16", LLAMA, **sp, recompute="full", precision="bf16", global_batch=2),
        _case("pp2 gpipe", LLAMA, pp=2, schedule="gpipe"),
        _case("pp2 1f1b", LLAMA, pp=2),
        _case("pp4 1f1b", GPT, pp=4, global_batch=8),
        _case(
            "pp3 1f1b, odd, recompute", replace(LLAMA_ODD, n_layers=4), pp=3, recompute="full", global_batch=6
        ),
        _case("pp2 gpipe, bf16", GPT, pp=2, schedule="gpipe", precision="bf16"),
        _case("pp2 1f1b, bf16-mixed", LLAMA, pp=2, precision="bf16-mixed"),
        _case("dp2 tp2", LLAMA, dp=2, tp=2),
        _case("dp2 tp2 sp zero1", GPT, dp=2, **sp, zero=1),
        _case("dp2 tp2 sp zero2", LLAMA, dp=2, **sp, zero=2),
        _case("dp2 tp2 zero3, bf16-mixed", LLAMA, dp=2, tp=2, zero=3, precision="bf16-mixed", global_batch=2),
        _case("pp2 dp2 1f1b", LLAMA, pp=2, dp=2),
        _case("pp2 dp2 zero1 gpipe", GPT, pp=2, dp=2, zero=1, schedule="gpipe"),
        _case("pp2 dp2 zero2 1f1b", LLAMA, pp=2, dp=2, zero=2),
        _case("pp2 dp2 zero3 gpipe, recompute", GPT, pp=2, dp=2, zero=3, schedule="gpipe", recompute="full"),
        _case("pp2 tp2 1f1b", LLAMA, pp=2, tp=2),
        _case("pp2 tp2 sp gpipe", GPT, pp=2, **sp, schedule="gpipe"),
        _case("pp2 dp2 tp2 sp zero3", LLAMA, pp=2, dp=2, **sp, zero=3),
        _case("pp2 dp2 tp2 zero1 gpipe", GPT, pp=2, dp=2, tp=2, zero=1, schedule="gpipe"),
    )
