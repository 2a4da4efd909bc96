"""Plans: what can be asked of a cluster, and what is refused."""

from dataclasses import dataclass
from math import gcd
from typing import Final, Literal

from memplan.checks import LARGEST_CLUSTER, checked_choice, checked_count, checked_flag
from memplan.errors import PlanRefused, divisors_text
from memplan.models import Model

Precision = Literal["fp32", "bf16", "bf16-mixed"]
Optimizer = Literal["sgd", "sgd-momentum", "adam", "adamw"]
Recompute = Literal["none", "full"]
Schedule = Literal["gpipe", "1f1b"]

PRECISIONS: Final = ("fp32", "bf16", "bf16-mixed")
OPTIMIZERS: Final = ("sgd", "sgd-momentum", "adam", "adamw")
RECOMPUTES: Final = ("none", "full")
SCHEDULES: Final = ("gpipe", "1f1b")
ENGINES: Final = ("torch", "textbook")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way of dividing a training job.

    Mesh axes, outermost first: `pp` pipeline stages, `dp` data-parallel replicas or shards, `tp` tensor
    shards; the world is their product. `zero`: 0 replicates (DDP), 1 shards optimizer state, 2 gradients
    too, 3 weights too. A step trains on `global_batch` sequences of `seq_len` tokens, each replica in
    micro-batches of `micro_batch`.

    Raises:
        InvalidValue, UnknownName: a value of the wrong type, out of range or in no table.
        PlanRefused: values that contradict each other; see `check_plan` for those that contradict a model.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    micro_batch: int = 1
    global_batch: int = 1
    seq_len: int = 1024
    precision: Precision = "bf16-mixed"
    optimizer: Optimizer = "adamw"
    recompute: Recompute = "none"
    schedule: Schedule = "1f1b"
    engine: str = "torch"

    def __post_init__(self) -> None:
        for field in ("dp", "tp", "pp"):
            object.__setattr__(self, field, checked_count(field, getattr(self, field), most=LARGEST_CLUSTER))
        for field in ("micro_batch", "global_batch", "seq_len"):
            object.__setattr__(self, field, checked_count(field, getattr(self, field)))
        object.__setattr__(self, "zero", checked_count("zero", self.zero, least=0, most=3))
        checked_flag("sequence_parallel", self.sequence_parallel)
        for field, choices in (
            ("precision", PRECISIONS),
            ("optimizer", OPTIMIZERS),
            ("recompute", RECOMPUTES),
            ("schedule", SCHEDULES),
            ("engine", ENGINES),
        ):
            checked_choice(field, getattr(self, field), choices)
        if self.world_size > LARGEST_CLUSTER:
            raise PlanRefused(
                f"pp x dp x tp = {self.pp} x {self.dp} x {self.tp} = {self.world_size} ranks are more than "
                f"{LARGEST_CLUSTER}; use smaller degrees."
            )
        per_pass = self.dp * self.micro_batch
        if self.global_batch % per_pass:
            raise PlanRefused(
                f"global_batch={self.global_batch} is not a multiple of dp x micro_batch = {self.dp} x "
                f"{self.micro_batch}; use {-(-self.global_batch // per_pass) * per_pass}."
            )
        if self.sequence_parallel and self.tp == 1:
            raise PlanRefused(
                "sequence_parallel=True divides the sequence over the tensor axis, but tp=1; "
                "use tp of 2 or more, or sequence_parallel=False."
            )

    @property
    def world_size(self) -> int:
        """Ranks: pp x dp x tp."""
        return self.pp * self.dp * self.tp

    @property
    def n_micro_batches(self) -> int:
        """Micro-batches each replica runs in one step."""
        return self.global_batch // (self.dp * self.micro_batch)


def stage_layers(n_layers: int, pp: int, stage: int) -> range:
    """The blocks of one pipeline stage: as even as possible, the first stages take the odd ones.

    >>> [stage_layers(7, 3, i) for i in range(3)]
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    each, odd = divmod(n_layers, pp)
    start = stage * each + min(stage, odd)
    return range(start, start + each + (stage < odd))


def check_plan(model: Model, plan: Plan) -> None:
    """Raise unless the plan's engine can run it on this model.

    The textbook knows no vocabulary to divide, no tied weights and no schedule to fill.

    Raises:
        PlanRefused: with value, rule and way out.
    """
    _check_tensor_axis(model, plan)
    _check_layers(model, plan)
    if plan.engine == "torch":
        _check_pipeline(model, plan)
        _check_data_axis(model, plan)
    if model.learned_positions and plan.seq_len > model.max_seq_len:
        raise PlanRefused(
            f"seq_len={plan.seq_len} is longer than max_seq_len={model.max_seq_len}, the table of learned "
            f"positions of {model.name}; use {model.max_seq_len} or less."
        )


def _check_tensor_axis(model: Model, plan: Plan) -> None:
    sizes = {"n_heads": model.n_heads}
    if plan.engine == "torch":
        sizes |= {"n_kv_heads": model.n_kv_heads, "d_ff": model.d_ff, "vocab_size": model.vocab_size}
    for name, total in sizes.items():
        if total % plan.tp:
            shared = gcd(*sizes.values())
            choices = f"one of {divisors_text(shared)}" if shared > 1 else "tp=1"
            if shared < gcd(model.n_kv_heads, model.d_ff) and plan.engine == "torch":
                choices += f", or pad vocab_size={model.vocab_size} to a multiple of tp"
            raise PlanRefused(f"tp={plan.tp} does not divide {name}={total}; use {choices}.")
    if plan.sequence_parallel and plan.seq_len % plan.tp:
        divisible = -(-plan.seq_len // plan.tp) * plan.tp
        if model.learned_positions:
            divisible = min(divisible, model.max_seq_len // plan.tp * plan.tp)
        raise PlanRefused(
            f"sequence_parallel=True needs tp={plan.tp} to divide seq_len={plan.seq_len}; use "
            f"{f'seq_len={divisible}' if divisible else 'sequence_parallel=False'}."
        )


def _check_layers(model: Model, plan: Plan) -> None:
    if plan.pp > model.n_layers:
        most = model.n_layers
        raise PlanRefused(f"pp={plan.pp} is more than n_layers={most}; use at most {most}.")


def _check_pipeline(model: Model, plan: Plan) -> None:
    if plan.pp == 1:
        return
    if model.tied_head:
        raise PlanRefused(
            f"pp={plan.pp} puts the embedding and the head of {model.name} on different stages, but they are "
            "tied; use pp=1, or the model with tied_head=False."
        )
    if plan.schedule == "1f1b" and plan.n_micro_batches < plan.pp:
        raise PlanRefused(
            f"schedule='1f1b' needs a micro-batch per stage, but there are {plan.n_micro_batches} for pp="
            f"{plan.pp}; use global_batch={plan.dp * plan.micro_batch * plan.pp} or more."
        )


def _check_data_axis(model: Model, plan: Plan) -> None:
    if plan.zero and plan.dp == 1:
        raise PlanRefused(
            f"zero={plan.zero} shards over data-parallel ranks, but dp=1; use dp of 2 or more, or zero=0."
        )
    if model.tied_head and plan.tp > 1 and plan.dp > 1 and plan.zero <= 1:
        raise PlanRefused(
            f"zero={plan.zero} replicates {model.name}'s tied head with DDP, which fails on a weight that tp="
            f"{plan.tp} has divided (aten.cat.default got mixed torch.Tensor and DTensor); use zero=2 or 3, "
            "tp=1, or the model with tied_head=False."
        )
