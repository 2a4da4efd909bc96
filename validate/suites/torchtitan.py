"""torchtitan's mixtures of experts under FSDP2, over expert-parallel ranks and pipelines."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from os.path import exists
from typing import Any, Final

from memplan.engines.checks import check_plan
from memplan.engines.options import plan_of
from memplan.errors import InvalidValue, MemplanError
from memplan.tape import Backend
from validate.cases import UNTIMED_STEPS, Case, Divided, divided_traces, shipped_trace, title, trace_file
from validate.gpus import Gpus
from validate.systems.torch.torchtitan import MIXTURES, PUBLISHED_MIXTURES

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


AT_TRUE_SIZE: Final[tuple[dict[str, Any], ...]] = (
    {"dp": 64, "zero": 3, "recompute": "full"},
    {"dp": 8, "zero": 3, "recompute": "full"},
    {"dp": 16, "zero": 2, "recompute": "full", "accumulate": 2},
    {"dp": 32, "dp_replicate": 2, "zero": 3},
    {"dp": 16, "pp": 4, "zero": 2, "recompute": "full", "accumulate": 8},
    {"dp": 16, "pp": 4, "zero": 2, "accumulate": 8, "rank": 63},
    {"dp": 16, "pp": 4, "zero": 2, "accumulate": 8, "rank": 20, "schedule": "gpipe", "recompute": "full"},
)
"""One rank of many, whose others are played; `rank`: which."""


def gpu_torchtitan(gpus: Gpus | None) -> tuple[Case, ...]:
    """Mixtures at true size, one rank of many.

    Raises:
        InvalidValue: there is no GPU, played or not.
    """
    if gpus is None:
        raise InvalidValue(
            "gpu-torchtitan runs models of true size; use --device nogpu, or the suite torchtitan."
        )
    found = []
    for one in divided_traces():
        for options in AT_TRUE_SIZE if one.name in PUBLISHED_MIXTURES else ():
            asked = {**options, "ep": one.ep, "precision": "bf16-mixed", "micro_batch": 1, "seq_len": 4096}
            rank = asked.pop("rank", 0)
            for case in _case(one.name, asked):
                case = replace(case, device=gpus.device, gpu=gpus.known_as, rank=rank, steps=UNTIMED_STEPS)
                backend: Backend = "nccl" if gpus.device == "nogpu" else "fake"
                name = f"{case.name}, rank {rank}"
                found.append(replace(case, name=name, backend=backend, timeout_s=600.0))
    return tuple(found)


def torchtitan() -> tuple[Case, ...]:
    """Small mixtures of experts on CPU ranks, over the expert-parallel ranks that they were traced for.

    Raises:
        InvalidValue: torchtitan is not installed.
    """
    if find_spec("torchtitan") is None:
        raise InvalidValue(
            "the suite torchtitan runs torchtitan's own modules, which are not installed here; use pip "
            "install torchtitan==0.3.0."
        )
    traced = {*divided_traces(), *[Divided(name) for name in MIXTURES if exists(trace_file(name))]}
    asked = [(name, one) for name in MIXTURES for one in PLANS if Divided(name, ep=one["ep"]) in traced]
    return tuple([case for name, options in asked for case in _case(name, options)])


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
