"""The language models of transformers in small, traced (`validate.architectures`), then run on CPU ranks."""

from collections.abc import Iterator
from typing import Any, Final

from memplan.device import CPU
from memplan.engines.checks import check_plan
from memplan.engines.options import plan_of
from memplan.errors import MemplanError
from memplan.models import TracedModel
from validate.cases import Case, architecture_traces, shipped_trace, title

FP32: Final = {"micro_batch": 2, "precision": "fp32"}
AUTOCAST: Final = {"micro_batch": 3, "precision": "bf16-mixed"}
SHARDED: Final = {"micro_batch": 2, "precision": "bf16-mixed", "dp": 2, "zero": 3}
OTHER_LENGTH: Final = 48
"""A length that was not traced."""


def architectures() -> tuple[Case, ...]:
    """Each on one rank as it was traced, under autocast, and over two ranks by FSDP2."""
    return tuple([case for name in architecture_traces() for case in _cases(shipped_trace(name))])


def _cases(model: TracedModel) -> Iterator[Case]:
    """In float32; under autocast with more samples and, if it may, fewer tokens; sharded, and recomputed."""
    other = OTHER_LENGTH if model.limits is None else model.max_seq_len
    whole: dict[str, Any] = SHARDED | {"recompute": "full"}
    for options, seq_len in ((AUTOCAST, other), (FP32, model.max_seq_len), (SHARDED, other), (whole, other)):
        plan = plan_of(**options, seq_len=seq_len)
        try:
            check_plan(model, plan, CPU)
        except MemplanError:
            continue  # blocks that cannot be recomputed
        yield Case(
            name=f"{title(model, plan)}, {plan.global_batch} x {plan.seq_len}",
            model=model,
            plan=plan,
            timeout_s=240.0,
        )
