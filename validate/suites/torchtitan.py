"""torchtitan's mixtures of experts under FSDP2, over expert-parallel ranks and pipelines."""

from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Final

from memplan.engines.checks import check_plan
from memplan.engines.options import plan_of
from memplan.errors import InvalidValue, MemplanError
from validate.cases import Case, shipped_trace, title
from validate.systems.torch.torchtitan import MIXTURES

PLANS: Final[tuple[dict[str, Any], ...]] = (
    {"ep": 2, "dp": 2, "zero": 3, "precision": "fp32"},
    {"ep": 2, "dp": 2, "zero": 3, "precision": "bf16-mixed", "recompute": "full"},
    {"ep": 2, "dp": 4, "zero": 3, "precision": "bf16-mixed"},
    {"ep": 2, "dp": 4, "zero": 3, "precision": "bf16-mixed", "recompute": "full", "accumulate": 2},
    {"ep": 2, "dp": 4, "zero": 2, "precision": "bf16-mixed", "recompute": "full"},
    {"ep": 2, "dp": 2, "dp_replicate": 2, "zero": 3, "precision": "bf16-mixed"},
    {"ep": 4, "dp": 4, "zero": 3, "precision": "bf16-mixed", "micro_batch": 4},
    {"ep": 1, "dp": 2, "zero": 3, "precision": "bf16-mixed"},
    {"ep": 1, "dp": 2, "zero": 3, "precision": "bf16-mixed", "recompute": "full"},
    {"ep": 2, "dp": 2, "pp": 2, "zero": 2, "precision": "fp32", "accumulate": 4},
    {"ep": 2, "dp": 2, "pp": 2, "zero": 2, "precision": "bf16-mixed", "recompute": "full", "accumulate": 4},
    {"ep": 2, "dp": 4, "pp": 2, "zero": 2, "precision": "bf16-mixed", "accumulate": 4},
    {"ep": 2, "dp": 2, "pp": 2, "zero": 2, "precision": "bf16-mixed", "accumulate": 4, "schedule": "gpipe"},
    {"ep": 2, "dp": 2, "pp": 2, "zero": 2, "precision": "bf16-mixed", "accumulate": 4,
     "schedule": "interleaved-1f1b", "virtual_stages": 2},
    {"ep": 2, "dp": 2, "pp": 2, "zero": 3, "precision": "bf16-mixed", "recompute": "full", "accumulate": 4},
    {"ep": 1, "dp": 2, "pp": 2, "zero": 2, "precision": "bf16-mixed", "accumulate": 4},
)  # fmt: skip
"""Plans on CPU ranks; `accumulate`: micro-batches of a replica."""


def torchtitan() -> tuple[Case, ...]:
    """Small mixtures of experts on CPU ranks.

    Raises:
        InvalidValue: torchtitan is not installed.
    """
    if find_spec("torchtitan") is None:
        raise InvalidValue(
            "the suite torchtitan runs torchtitan's own modules, which are not installed here; use pip "
            "install torchtitan==0.3.0."
        )
    return tuple([case for name in list(MIXTURES)[:1] for options in PLANS for case in _case(name, options)])


def _case(name: str, options: dict[str, Any]) -> Iterator[Case]:
    asked = {"dp_replicate": 1, "accumulate": 1, "micro_batch": 2, "seq_len": 64, **options}
    replicas = asked["dp"] * asked["dp_replicate"]
    asked["global_batch"] = replicas * asked["micro_batch"] * asked.pop("accumulate")
    plan = plan_of(**asked, fsdp_units="block+ends")
    model = shipped_trace(name, ep=plan.ep)
    with suppress(MemplanError):
        check_plan(model, plan)
        named = f"{title(model, plan)}, {plan.global_batch} x {plan.seq_len}"
        yield Case(name=named, model=model, plan=plan, timeout_s=240.0)
