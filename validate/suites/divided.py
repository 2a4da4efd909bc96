"""Other people's modules divided over ranks by their own framework's plan, beside other axes.

The plans are flat lists. A plan runs with every module whose trace for its `tp` and `ep` is in
`data/traces/divided`.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Final

from memplan.engines.checks import check_plan
from memplan.engines.options import plan_of
from memplan.errors import InvalidValue, MemplanError
from memplan.models import TracedModel
from memplan.tape import Backend
from validate.cases import UNTIMED_STEPS, Case, Divided, divided_traces, shipped_trace, title
from validate.gpus import Gpus
from validate.systems.torch.architectures import is_architecture
from validate.systems.torch.torchtitan import OF_TORCHTITAN
from validate.systems.torch.wild import PUBLISHED, wild_named

ALONE: Final[tuple[dict[str, Any], ...]] = (
    {"micro_batch": 2, "precision": "fp32"},
    {"micro_batch": 3, "global_batch": 6, "precision": "bf16", "clip_grad_norm": 1.0},
    {"micro_batch": 4, "precision": "bf16-mixed", "recompute": "full"},
    {"micro_batch": 2, "global_batch": 4, "optimizer": "sgd-momentum", "set_to_none": False},
)
"""Tensor ranks alone."""

MIXED: Final[tuple[dict[str, Any], ...]] = (
    {"dp": 2, "zero": 3, "micro_batch": 2, "precision": "bf16-mixed"},
    {"dp": 2, "zero": 2, "micro_batch": 2, "global_batch": 8, "precision": "bf16", "recompute": "full"},
    {"dp": 2, "zero": 3, "fsdp_units": "block+ends", "micro_batch": 2, "clip_grad_norm": 1.0},
    {"pp": 2, "micro_batch": 2, "global_batch": 8, "precision": "fp32"},
    {"pp": 2, "dp": 2, "zero": 2, "micro_batch": 2, "global_batch": 16, "recompute": "full"},
    {"dp": 2, "dp_replicate": 2, "zero": 3, "micro_batch": 2, "precision": "fp32"},
)
"""Beside FSDP2, replicas of it, and pipelines: two tensor ranks."""

ARCHITECTURES: Final[tuple[dict[str, Any], ...]] = (
    {"micro_batch": 2, "precision": "fp32"},
    {"dp": 2, "zero": 3, "micro_batch": 2, "precision": "bf16-mixed", "recompute": "full"},
)
"""Each language model of transformers."""

EXPERTS: Final[tuple[dict[str, Any], ...]] = (
    {"zero": 3, "micro_batch": 2, "precision": "fp32"},
    {"zero": 3, "micro_batch": 2, "precision": "bf16-mixed", "recompute": "full"},
    {"zero": 2, "micro_batch": 2, "accumulate": 2, "precision": "bf16", "recompute": "full"},
    {"zero": 3, "micro_batch": 4, "precision": "bf16", "optimizer": "sgd-momentum", "set_to_none": False},
    {"zero": 3, "micro_batch": 2, "accumulate": 2, "precision": "bf16-mixed", "fsdp_units": "block+ends"},
    {"zero": 3, "micro_batch": 2, "precision": "fp32", "optimizer_impl": "foreach", "recompute": "full"},
    {"zero": 3, "micro_batch": 2, "precision": "bf16-mixed", "dp_replicate": 2},
)
"""Beside expert-parallel ranks, on one group of them and on two; `accumulate`: micro-batches of a replica."""

IN_ONE_GROUP: Final[tuple[dict[str, Any], ...]] = (
    {"micro_batch": 2, "precision": "fp32"},
    {"micro_batch": 2, "precision": "bf16-mixed", "recompute": "full"},
)
"""Expert-parallel ranks that are the tensor ranks, and no others."""

MIXTURES: Final[tuple[dict[str, Any], ...]] = (
    {"zero": 3, "micro_batch": 2, "precision": "fp32", "recompute": "full"},
    {"zero": 3, "micro_batch": 2, "precision": "bf16-mixed"},
)
"""Each mixture of experts of transformers, on two groups of expert-parallel ranks."""

SEQUENCES: Final[tuple[dict[str, Any], ...]] = (
    {"zero": 3, "micro_batch": 2, "precision": "fp32", "cp_rotate_method": "alltoall"},
    {"zero": 3, "micro_batch": 1, "precision": "bf16-mixed", "recompute": "full"},
    {"zero": 3, "micro_batch": 2, "precision": "fp32", "recompute": "full"},
    {"zero": 2, "micro_batch": 2, "accumulate": 2, "precision": "bf16", "cp_rotate_method": "alltoall"},
    {"zero": 3, "micro_batch": 1, "precision": "bf16", "fsdp_units": "block+ends", "clip_grad_norm": 1.0},
    {"zero": 3, "dp": 2, "micro_batch": 2, "precision": "bf16-mixed", "clip_grad_norm": 1.0},
    {"zero": 3, "dp": 2, "micro_batch": 1, "accumulate": 2, "precision": "fp32", "recompute": "full"},
    {"zero": 3, "dp_replicate": 2, "micro_batch": 2, "precision": "bf16-mixed", "optimizer": "sgd-momentum"},
    {"zero": 0, "micro_batch": 2, "precision": "bf16-mixed", "recompute": "full"},
    {"zero": 0, "dp": 2, "micro_batch": 1, "accumulate": 2, "precision": "bf16-mixed"},
    {"zero": 0, "micro_batch": 2, "precision": "bf16", "gradient_as_bucket_view": True},
    {"zero": 1, "micro_batch": 1, "accumulate": 2, "precision": "fp32", "clip_grad_norm": 1.0},
    {"zero": 1, "dp": 2, "micro_batch": 2, "precision": "bf16", "cp_rotate_method": "alltoall"},
    {"zero": 3, "fsdp_version": 1, "micro_batch": 2, "precision": "bf16-mixed", "recompute": "full"},
    {
        "zero": 2,
        "fsdp_version": 1,
        "dp": 2,
        "micro_batch": 1,
        "accumulate": 2,
        "precision": "bf16",
        "clip_grad_norm": 1.0,
    },
    {"zero": 0, "pp": 2, "micro_batch": 2, "accumulate": 2, "precision": "fp32"},
    {"zero": 3, "pp": 2, "micro_batch": 2, "accumulate": 2, "precision": "bf16-mixed", "recompute": "full"},
    {
        "zero": 2, "pp": 2, "micro_batch": 1, "accumulate": 4, "precision": "bf16", "schedule": "gpipe",
        "cp_rotate_method": "alltoall",
    },
    {
        "zero": 1, "pp": 2, "micro_batch": 2, "accumulate": 4, "precision": "bf16-mixed",
        "schedule": "interleaved-1f1b", "virtual_stages": 2, "clip_grad_norm": 1.0,
    },
    {"zero": 3, "pp": 2, "micro_batch": 1, "accumulate": 2, "precision": "fp32", "clip_grad_norm": 1.0},
)  # fmt: skip
"""Beside context-parallel ranks, by each wrapper; `accumulate`: micro-batches of a replica."""

N_OF_ARCHITECTURES: Final = 2
"""The first of them, for each language model of transformers."""

FEW_RANKS: Final = 4
MOST_RANKS: Final = 8
"""Of a case; only the first `ON_MANY_RANKS` plans run on more than a few, which take long on two cores."""

ON_MANY_RANKS: Final = 2

UNEVEN: Final = "hf-llama-odd"
"""A module whose sizes the ranks do not divide: `tests/test_divided.py` compares the first rank."""

AT_TRUE_SIZE: Final[tuple[dict[str, Any], ...]] = (
    {"precision": "bf16", "recompute": "full"},
    {"dp": 8, "zero": 3, "precision": "bf16-mixed", "recompute": "full"},
    {
        "dp": 8,
        "zero": 2,
        "precision": "bf16-mixed",
        "global_batch": 16,
        "clip_grad_norm": 1.0,
        "recompute": "full",
    },
    {"dp": 4, "dp_replicate": 2, "zero": 3, "precision": "bf16-mixed", "fsdp_units": "block+ends"},
)
"""One rank of 2 to 64, whose others are played."""


EXPERTS_AT_TRUE_SIZE: Final[tuple[dict[str, Any], ...]] = (
    {"groups": 1, "zero": 3, "precision": "bf16", "recompute": "full"},
    {"groups": 16, "zero": 3, "precision": "bf16-mixed", "recompute": "full"},
    {"groups": 8, "zero": 2, "precision": "bf16", "accumulate": 2, "recompute": "full"},
    {"groups": 16, "zero": 3, "precision": "bf16"},
    {"groups": 8, "zero": 3, "precision": "bf16-mixed", "dp_replicate": 2, "fsdp_units": "block+ends"},
)
"""One rank of 1 to 16 groups of expert-parallel ranks, whose others are played."""


SEQUENCES_AT_TRUE_SIZE: Final[tuple[dict[str, Any], ...]] = (
    {"zero": 3, "precision": "bf16-mixed", "recompute": "full", "tokens": 16_384},
    {
        "zero": 3, "precision": "bf16-mixed", "recompute": "full", "cp_rotate_method": "alltoall",
        "tokens": 8192,
    },
    {"zero": 2, "precision": "bf16", "tokens": 4096},
    {"zero": 3, "dp": 4, "precision": "bf16", "accumulate": 2, "recompute": "full", "tokens": 8192},
    {
        "zero": 3, "dp_replicate": 2, "dp": 4, "precision": "bf16-mixed", "fsdp_units": "block+ends",
        "recompute": "full", "clip_grad_norm": 1.0, "tokens": 4096,
    },
)  # fmt: skip
"""One rank of 8 to 64 that divide sequences, with so many tokens on each of these."""

OF_STAGES_AT_TRUE_SIZE: Final[tuple[dict[str, Any], ...]] = (
    {"pp": 2, "zero": 3, "precision": "bf16-mixed", "accumulate": 4, "recompute": "full", "tokens": 16_384},
    {
        "pp": 4, "zero": 2, "dp": 2, "precision": "bf16", "accumulate": 8, "recompute": "full",
        "schedule": "interleaved-1f1b", "virtual_stages": 2, "tokens": 16_384,
    },
    {"pp": 4, "zero": 0, "precision": "bf16", "accumulate": 4, "recompute": "full", "tokens": 16_384},
    {"pp": 2, "zero": 1, "dp": 2, "precision": "bf16", "accumulate": 4, "recompute": "full", "tokens": 8192},
    {"zero": 1, "dp": 2, "precision": "bf16", "recompute": "full", "tokens": 16_384},
    {"zero": 3, "fsdp_version": 1, "dp": 2, "precision": "bf16", "recompute": "full", "tokens": 16_384},
)  # fmt: skip
"""The same in stages, under DDP, ZeRO-1 and FSDP1: the first and the last stage's first rank."""

OF_EIGHT: Final = (Divided("llama-3-8b", tp=1, ep=1, cp=8), Divided("qwen2.5-7b", tp=1, ep=1, cp=8))
"""The models that run these: each has 8 ranks for a sequence of 131,072 tokens."""


def divided() -> tuple[Case, ...]:
    """Small modules on CPU ranks.

    Raises:
        InvalidValue: if transformers is not installed.
    """
    _check_installed()
    asked = [one for one in divided_traces() if max(one.ep, one.cp) == 1]
    return tuple([case for one in asked for case in _small(one.name, one.tp)])


def context() -> tuple[Case, ...]:
    """Small language models whose sequences are divided over context-parallel CPU ranks.

    Raises:
        InvalidValue: if transformers is not installed.
    """
    _check_installed()
    asked = [one for one in divided_traces() if one.cp > 1 and one.name not in PUBLISHED]
    return tuple([case for one in asked for case in _of_sequences(one)])


def _of_sequences(one: Divided) -> Iterator[Case]:
    model = shipped_trace(*one)
    plans = SEQUENCES[:N_OF_ARCHITECTURES] if is_architecture(one.name) else SEQUENCES
    for options in plans:
        asked = _of_ring(one, options)
        if plan_of(**asked, tp=one.tp, seq_len=model.max_seq_len).world_size <= FEW_RANKS:
            yield from _cases(model, one.tp, [asked])


def experts() -> tuple[Case, ...]:
    """Small mixtures of experts over expert-parallel CPU ranks.

    Raises:
        InvalidValue: if transformers is not installed.
    """
    _check_installed()
    others = PUBLISHED | OF_TORCHTITAN
    asked = [one for one in divided_traces() if one.ep > 1 and one.name not in others]
    return tuple([case for one in asked for case in _of_experts(one)])


def _of_experts(one: Divided) -> Iterator[Case]:
    model = shipped_trace(*one)
    if is_architecture(one.name):
        yield from _with_experts(model, one, MIXTURES, 2)
        return
    if one.ep == one.tp:
        yield from _with_experts(model, one, IN_ONE_GROUP, 1)
    for n_groups in (1, 2):
        yield from _with_experts(model, one, EXPERTS, n_groups)


def _with_experts(
    model: TracedModel, one: Divided, plans: Iterable[dict[str, Any]], n_groups: int
) -> Iterator[Case]:
    for i, options in enumerate(plans):
        asked = _in_groups(one, {**options, "groups": n_groups})
        most = MOST_RANKS if i < ON_MANY_RANKS else FEW_RANKS
        if asked["dp"] * asked["dp_replicate"] * one.tp <= most:
            yield from _cases(model, one.tp, [asked])


def gpu_divided(gpus: Gpus | None) -> tuple[Case, ...]:
    """Published models at true size, one rank of many; without a GPU the small ones.

    Raises:
        InvalidValue: as `divided`.
    """
    _check_installed()
    if gpus is None:
        return divided()
    backend: Backend = "nccl" if gpus.device == "nogpu" else "fake"
    found = []
    on_gpu: dict[str, Any] = {"device": gpus.device, "gpu": gpus.known_as, "backend": backend}
    for one in [each for each in divided_traces() if each.name in PUBLISHED]:
        for case in _cases(shipped_trace(*one), one.tp, _at_true_size(one), wild_named(one.name).seq_len):
            last = case.plan.world_size - case.plan.world_size // case.plan.pp
            for rank in dict.fromkeys([0, last]):
                name = f"{case.name}, rank {rank}" if rank else case.name
                found.append(
                    replace(case, **on_gpu, name=name, rank=rank, steps=UNTIMED_STEPS, timeout_s=600.0)
                )
    return tuple(found)


def _at_true_size(one: Divided) -> Iterable[dict[str, Any]]:
    """The plans of a published model over these ranks."""
    if one.ep > 1:
        return [_in_groups(one, plan) for plan in EXPERTS_AT_TRUE_SIZE]
    if one.cp == 1:
        return AT_TRUE_SIZE
    plans = SEQUENCES_AT_TRUE_SIZE
    if one in OF_EIGHT:
        plans += OF_STAGES_AT_TRUE_SIZE
    return [_of_ring(one, plan) | {"seq_len": plan["tokens"] * one.cp} for plan in plans]


def _of_ring(one: Divided, plan: dict[str, Any]) -> dict[str, Any]:
    """A plan on context-parallel ranks; `accumulate`: micro-batches of a replica."""
    asked = {"dp": 1, "dp_replicate": 1, "micro_batch": 1, "accumulate": 1, **plan, "cp": one.cp}
    asked.pop("tokens", None)
    n_replicas = asked["dp"] * asked["dp_replicate"]
    asked["global_batch"] = n_replicas * asked["micro_batch"] * asked.pop("accumulate")
    return asked


def _in_groups(one: Divided, plan: dict[str, Any]) -> dict[str, Any]:
    """A plan on groups of expert-parallel ranks; `accumulate`: micro-batches of a replica."""
    asked = {"dp_replicate": 1, "accumulate": 1, "micro_batch": 1, **plan, "ep": one.ep}
    asked["dp"] = dp = asked.pop("groups") * one.ep // one.tp
    asked["global_batch"] = dp * asked["dp_replicate"] * asked["micro_batch"] * asked.pop("accumulate")
    return asked


def _check_installed() -> None:
    if find_spec("transformers") is None:
        raise InvalidValue(
            "suites of divided modules run those of transformers, which is not installed here; use pip "
            "install 'memplan[huggingface]'."
        )


def _small(name: str, tp: int) -> Iterator[Case]:
    """The cases of a small module; none of a published one, or of one whose ranks differ."""
    if name not in (*PUBLISHED, UNEVEN):
        plans = ARCHITECTURES if is_architecture(name) else ALONE if tp > 2 else (*ALONE, *MIXED)
        yield from _cases(shipped_trace(name, tp), tp, plans)


def _cases(
    model: TracedModel, tp: int, plans: Iterable[dict[str, Any]], seq_len: int | None = None
) -> Iterator[Case]:
    """A case for each plan that is allowed: tied models have no pipelines, say."""
    for options in plans:
        plan = plan_of(**{"seq_len": seq_len or model.max_seq_len, **options}, tp=tp)
        with suppress(MemplanError):
            check_plan(model, plan)
            name = f"{title(model, plan)}, {plan.global_batch} x {plan.seq_len}"
            yield Case(name=name, model=model, plan=plan, timeout_s=240.0)
