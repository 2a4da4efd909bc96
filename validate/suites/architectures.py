"""The language models of transformers in small, traced (`validate.architectures`), then run on CPU ranks."""

from collections.abc import Iterator
from typing import Any, Final

from memplan.device import CPU
from memplan.engines.checks import check_plan
from memplan.engines.options import plan_of
from memplan.errors import MemplanError
from memplan.models import TracedModel
from memplan.plan import Plan
from validate.cases import Case, architecture_traces, shipped_trace, title

FP32: Final[dict[str, Any]] = {"micro_batch": 2, "precision": "fp32"}
AUTOCAST: Final[dict[str, Any]] = {"micro_batch": 3, "precision": "bf16-mixed"}
SHARDED: Final[dict[str, Any]] = {
    "dp": 2,
    "zero": 3,
    "recompute": "full",
    "micro_batch": 2,
    "precision": "bf16-mixed",
}
KEPT: Final = tuple(f"hf-causal-{kind}" for kind in ("cpmant", "ctrl", "gpt_neox_japanese"))
"""Architectures whose blocks transformers does not recompute."""

OTHER_LENGTH: Final = 48
"""A length that was not traced."""


def architectures() -> tuple[Case, ...]:
    """Each on one rank as it was traced, under autocast, and over two ranks by FSDP2."""
    return tuple([case for name in architecture_traces() for case in _cases(shipped_trace(name))])


def _cases(model: TracedModel) -> Iterator[Case]:
    """In float32; under autocast with more samples and, if it may, fewer tokens; sharded and recomputed."""
    other = OTHER_LENGTH if model.limits is None else model.max_seq_len
    sharded = SHARDED | ({"recompute": "none"} if model.name in KEPT else {})
    for options, seq_len in ((AUTOCAST, other), (FP32, model.max_seq_len), (sharded, other)):
        plan = plan_of(**options, seq_len=seq_len)
        if plan.fsdp and not _may_run(model, plan):
            continue
        name = f"{title(model, plan)}, {plan.global_batch} x {plan.seq_len}"
        yield Case(name=name, model=model, plan=plan, timeout_s=240.0)


def _may_run(model: TracedModel, plan: Plan) -> bool:
    """Whether a plan is allowed; blocks that own no weights of their own cannot be recomputed, say."""
    try:
        check_plan(model, plan, CPU)
    except MemplanError:
        return False
    return True
