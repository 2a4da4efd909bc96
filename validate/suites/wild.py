"""Other people's modules as they are (`validate.systems.torch.wild`), on CPU ranks: traced and run.

A flat list of plans, each with every module that can run it. Modules of a package that is not installed are
left out.
"""

from importlib.util import find_spec
from typing import Any, Final

from memplan.engines.options import plan_of
from validate.cases import Case, shipped_trace, title
from validate.systems.torch.wild import WILD

PLANS: Final[tuple[dict[str, Any], ...]] = (
    {"micro_batch": 2, "precision": "fp32"},
    {"micro_batch": 3, "global_batch": 6, "precision": "bf16"},
    {"micro_batch": 4, "precision": "bf16-mixed"},
    {"micro_batch": 4, "precision": "bf16-mixed", "recompute": "full"},
    {"dp": 2, "micro_batch": 2, "global_batch": 8, "precision": "fp32"},
    {"dp": 2, "zero": 3, "micro_batch": 2, "precision": "bf16-mixed"},
    {"dp": 2, "zero": 3, "micro_batch": 4, "precision": "fp32", "recompute": "full"},
)

FROZEN_PLANS: Final[tuple[dict[str, Any], ...]] = (
    {"dp": 2, "zero": 1, "micro_batch": 2, "global_batch": 8},
    {"dp": 2, "zero": 2, "micro_batch": 2, "global_batch": 8},
    {"dp": 2, "zero": 3, "fsdp_blocks": 2, "micro_batch": 2, "precision": "bf16"},
    {"dp": 2, "zero": 3, "fsdp_units": "model", "micro_batch": 2},
    {"dp": 2, "dp_replicate": 2, "zero": 3, "micro_batch": 2, "global_batch": 16, "precision": "bf16-mixed"},
    {"micro_batch": 2, "optimizer": "sgd-momentum", "clip_grad_norm": 1.0, "set_to_none": False},
)
"""For modules that are frozen in part, beside the others."""
"""Without recomputation every module, with it those of transformers, which have their own."""


def wild() -> tuple[Case, ...]:
    """Every module under every plan that it can run."""
    found = []
    for name, one in WILD.items():
        if find_spec(one.package) is None:
            continue
        model = shipped_trace(name)
        for options in (*PLANS, *(FROZEN_PLANS if model.frozen else ())):
            if "recompute" in options and one.package != "transformers":
                continue
            plan = plan_of(**options, seq_len=one.seq_len)
            if plan.recompute != "none" and not model.n_layers:
                continue
            if plan.fsdp and model.integer_dtypes:
                continue
            case = f"{title(model, plan)}, {plan.global_batch} x {plan.seq_len}"
            found.append(Case(name=case, model=model, plan=plan, timeout_s=240.0))
    return tuple(found)
