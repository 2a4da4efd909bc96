"""Cases of an engine: small ones on CPU ranks, and one rank of true size with stand-ins for the others."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from memplan.engines.options import plan_of
from memplan.errors import InvalidValue
from memplan.models import Decoder
from memplan.tape import Backend
from validate.cases import UNTIMED_STEPS, Case, runnable, title
from validate.gpus import Gpus

LLAMA_8B: Final = runnable("llama-3-8b")
GPT_XL: Final = replace(runnable("gpt2-xl"), tied_head=False, max_seq_len=4096)

FULL: Final[dict[str, Any]] = {"recompute": "full"}

OF_SMALL: Final[dict[str, Any]] = {"dp": 2, "zero": 2, "precision": "fp32", "seq_len": 64}
OF_LARGE: Final[dict[str, Any]] = {"dp": 8, "zero": 2, "precision": "bf16-mixed", "seq_len": 4096}
"""What a plan has that is not asked otherwise."""

Small = tuple[Decoder, dict[str, Any]]
"""A model, and what its plan has."""

Large = tuple[Decoder, int, dict[str, Any], int]
"""A model, its layers, what its plan has, and the rank that runs alone."""


def small_cases(engine: str, called: str, rows: Iterable[Small]) -> Iterator[Case]:
    """Cases of an engine on CPU ranks, whose names end with what people call it."""
    for model, asked in rows:
        plan = plan_of(**OF_SMALL | {"engine": engine} | asked)
        yield Case(name=f"{title(model, plan)}, {called}", model=model, plan=plan)


def cases_alone(engine: str, rows: Iterable[Large], gpus: Gpus | None) -> Iterator[Case]:
    """Cases of an engine on one rank of a world with stand-ins for the others.

    Raises:
        InvalidValue: without a GPU.
    """
    if gpus is None:
        raise InvalidValue(
            f"gpu-{engine} has models of true size; use --device nogpu, or the suite {engine}."
        )
    backend: Backend = "nccl" if gpus.device == "nogpu" else "fake"
    for model, n_layers, asked, rank in rows:
        plan, own = plan_of(**OF_LARGE | {"engine": engine} | asked), replace(model, n_layers=n_layers)
        name = f"{title(own, plan)}, {n_layers} layers, {plan.n_micro_batches} x {plan.seq_len}, rank {rank}"
        case = Case(name=name, model=own, plan=plan, rank=rank, steps=UNTIMED_STEPS, timeout_s=600.0)
        yield replace(case, device=gpus.device, gpu=gpus.known_as, backend=backend)
