"""Every combination of the axes, and every pair of all other options."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, Final

from memplan import Gpt, Llama, Plan
from memplan.device import CPU
from memplan.engines.checks import check_plan
from memplan.engines.options import plan_of
from memplan.errors import MemplanError, MissingRule
from memplan.models import Decoder
from memplan.plan import RECOMPUTES
from memplan.schedules import SCHEDULES
from validate.cases import Case, title

MOST_RANKS: Final = 8
MOST_RANKS_FULLY_CROSSED: Final = 4

STAGES_PER_RANK: Final = {
    "gpipe": 1, "1f1b": 1, "interleaved-1f1b": 2, "looped-bfs": 2, "zero-bubble": 2, "zbv": 2,
    "dualpipe-v": 2,
}  # fmt: skip
"""Virtual stages that each schedule runs with here."""

PAIRED: Final[dict[str, Sequence[Any]]] = {
    "family": ("gpt", "llama"),
    "mesh": (
        {},
        {"dp": 2},
        {"dp": 3},
        {"tp": 2},
        {"pp": 2},
        {"dp": 2, "tp": 2},
        {"dp": 2, "pp": 2},
        {"tp": 2, "pp": 2},
        {"dp": 2, "dp_replicate": 2},
        {"dp": 2, "dp_replicate": 2, "tp": 2},
        {"dp": 2, "dp_replicate": 2, "pp": 2},
        {"dp": 2, "tp": 2, "pp": 2},
    ),
    "zero": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
    "schedule": tuple(SCHEDULES.own),
    "recompute": RECOMPUTES,
    "recompute_blocks": (None, 1),
    "layers": ("even", "uneven", "no first"),
    "precision": ("fp32", "bf16", "bf16-mixed", "fp16-mixed"),
    "optimizer": ("sgd", "sgd-momentum", "adam", "adamw"),
    "optimizer_impl": ("for-loop", "foreach", "fused"),
    "clip_grad_norm": (None, 1.0),
    "set_to_none": (True, False),
    "fsdp_units": ("block", "block+ends", "model"),
    "fsdp_blocks": (1, 2),
    "offload": (False, True),
    "gradient_as_bucket_view": (False, True),
    "static_graph": (False, True),
    "bucket_cap_bytes": (None, 65536),
    "ddp_comm_hook": ("none", "fp16", "bf16", "powersgd"),
    "loss_chunks": (1, 3),
    "micro_batch": (1, 2),
    "tied_head": (False, True),
    "dropout": (0.0, 0.1),
}
"""All options but the sizes of the axes; `layers` of the stages, a model with `dropout` or a `tied_head`."""


def matrix() -> tuple[Case, ...]:
    """All (dp, tp, pp) of up to 8 ranks x ZeRO x SP x schedule x recompute; then pairs of every option.

    On more than 4 ranks recompute takes turns: one of its values for each of the other combinations.
    """
    return tuple(_named([*_crossed(), *_paired()]))


def _crossed() -> Iterator[tuple[Decoder, Plan]]:
    """Every combination of the axes that can run; family and precision take turns."""
    every = range(1, MOST_RANKS + 1)
    meshes = [(d, t, p) for d, t, p in product(every, repeat=3) if d * t * p <= MOST_RANKS]
    turn = 0
    for dp, tp, pp in sorted(meshes, key=lambda mesh: (prod(mesh), mesh)):
        for zero, sp, schedule in product(
            range(4) if dp > 1 else (0,),
            (False, True) if tp > 1 else (False,),
            SCHEDULES.own if pp > 1 else ("1f1b",),
        ):
            crossed = dp * tp * pp <= MOST_RANKS_FULLY_CROSSED
            for recompute in RECOMPUTES if crossed else RECOMPUTES[turn % 3 :][:1]:
                chosen = {
                    "family": ("llama", "gpt")[turn % 2],
                    "mesh": {"dp": dp, "tp": tp, "pp": pp},
                    "zero": zero,
                    "sequence_parallel": sp,
                    "schedule": schedule,
                    "recompute": recompute,
                    "precision": ("fp32", "bf16-mixed")[turn // 2 % 2],
                }
                if _can_run(chosen):
                    turn += 1
                    yield _asked(chosen)


def _paired() -> Iterator[tuple[Decoder, Plan]]:
    """Plans in which every two values of any two options meet, where they can."""
    from allpairspy import AllPairs

    names = list(PAIRED)
    rows = AllPairs(
        list(PAIRED.values()), filter_func=lambda row: _can_run(dict(zip(names, row, strict=False)))
    )
    for row in rows:
        yield _asked(dict(zip(names, row, strict=True)))


def _can_run(chosen: dict[str, Any]) -> bool:
    try:
        model, plan = _asked(chosen)
        check_plan(model, plan, CPU)
    except MissingRule:
        return True
    except MemplanError:
        return False
    return True


def _asked(chosen: dict[str, Any]) -> tuple[Decoder, Plan]:
    """The model and the plan of values of `PAIRED`, those not chosen as a Plan has them."""
    options = dict(chosen)
    family, mesh = options.pop("family", "llama"), options.pop("mesh", {})
    kind = {name: options.pop(name) for name in ("tied_head", "dropout") if name in options}
    dealt = options.pop("layers", "even")
    pp, tp = mesh.get("pp", 1), mesh.get("tp", 1)
    per_rank = STAGES_PER_RANK[options.get("schedule", "1f1b")] if pp > 1 else 1
    if pp == 1:
        options.pop("schedule", None)
    n_stages = pp * per_rank
    replicas = mesh.get("dp", 1) * mesh.get("dp_replicate", 1)
    layers = None
    if dealt != "even" and n_stages > 1:
        layers = (2 if dealt == "uneven" else 0, *(1,) * (n_stages - 2), 3)
    model = sized(family, tp=tp, n_layers=sum(layers) if layers else max(3, n_stages + 1), **kind)
    plan = plan_of(
        **mesh,
        **{"precision": "fp32", "optimizer": "adamw"} | options,
        virtual_stages=per_rank,
        layers_per_stage=layers,
        global_batch=replicas * options.get("micro_batch", 1) * 2 * pp,
        seq_len=-(-32 // tp) * tp,
    )
    return model, plan


def sized(family: str, *, tp: int, n_layers: int, tied_head: bool = False, dropout: float = 0.0) -> Decoder:
    """A small model whose heads, widths and vocabulary `tp` ranks can divide; only a Gpt has dropout."""
    heads_per_rank = -(-4 // tp)
    n_heads = heads_per_rank * tp
    sizes: dict[str, Any] = {
        "n_layers": n_layers,
        "d_model": 16 * n_heads,
        "n_heads": n_heads,
        "d_ff": 16 * n_heads * 5 // 2 // tp * tp,
        "vocab_size": 320 // tp * tp,
        "max_seq_len": 64,
        "tied_head": tied_head,
    }
    if family == "gpt":
        return Gpt(name="gpt", dropout=dropout, **sizes)
    return Llama(name="llama", n_kv_heads=n_heads // 2 if n_heads // 2 % tp == 0 else n_heads, **sizes)


def _named(asked: Sequence[tuple[Decoder, Plan]]) -> Iterator[Case]:
    """A case each, in order, the same plan for the same model once."""
    for model, plan in dict.fromkeys(asked):
        yield Case(name=title(model, plan), model=model, plan=plan)
