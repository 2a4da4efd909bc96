"""The language models of transformers in small, on one CPU rank: traced (`validate.architectures`), run."""

from memplan.engines.options import plan_of
from validate.cases import Case, architecture_traces, shipped_trace, title

FP32, AUTOCAST = {"micro_batch": 2, "precision": "fp32"}, {"micro_batch": 3, "precision": "bf16-mixed"}
OTHER_LENGTH = 48
"""A length that was not traced."""


def architectures() -> tuple[Case, ...]:
    """Each as it was traced, in float32; under autocast with more samples and, if it may, fewer tokens."""
    found = []
    for name in architecture_traces():
        model = shipped_trace(name)
        other = OTHER_LENGTH if model.limits is None else model.max_seq_len
        for options, seq_len in ((AUTOCAST, other), (FP32, model.max_seq_len)):
            plan = plan_of(**options, seq_len=seq_len)
            case = f"{title(model, plan)}, {plan.global_batch} x {plan.seq_len}"
            found.append(Case(name=case, model=model, plan=plan, timeout_s=240.0))
    return tuple(found)
