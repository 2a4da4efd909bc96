"""The papers' and the courses' own accounting: for teaching and for checking formulas, never for `fits`.

Symbols as in the papers: Psi parameters, N_d data-parallel ranks; s sequence length, b micro-batch, h width,
a heads, L layers, v vocabulary, t tensor-parallel ranks, p pipeline stages, m interleaved model chunks per
stage. Every result is a real number of bytes (or elements): the formulas know no rounding, no padding, no
buffers and no allocator, and here they stay so.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, final

from memplan.checks import checked_count
from memplan.device import Device
from memplan.engines.base import Engine, RankRecord, Rule
from memplan.engines.refusals import check_divided, check_layers, check_positions, check_sequence
from memplan.errors import MissingRule
from memplan.memory import Alive
from memplan.mesh import Group
from memplan.models import Decoder, Model, parameter_count
from memplan.orders import under_way
from memplan.plan import Plan, Rank, Recompute, stage_layers
from memplan.record import (
    Collective,
    CollectiveKind,
    Compute,
    ComputeKind,
    Event,
    Phase,
    allocs,
    events,
    frees,
)
from memplan.shapes import BF16, UINT8, Buffer, Kind
from memplan.tape import Backend

# --- States -----------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TextbookStates:
    """Model states in bytes: of one GPU, or of one parameter by a convention."""

    weights_bytes: float
    grads_bytes: float
    optimizer_bytes: float

    @property
    def total_bytes(self) -> float:
        """All three.

        >>> MIXED_ADAM.total_bytes, MEGATRON_ADAM.total_bytes, FP32_ADAM.total_bytes
        (16, 18, 16)
        """
        return self.weights_bytes + self.grads_bytes + self.optimizer_bytes


MIXED_ADAM: Final = TextbookStates(weights_bytes=2, grads_bytes=2, optimizer_bytes=12)
"""16 bytes: fp16 weights and gradients; fp32 copy of the weights, momentum and variance (K = 12).

Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 3.1.
"""

MEGATRON_ADAM: Final = TextbookStates(weights_bytes=2, grads_bytes=4, optimizer_bytes=12)
"""18 bytes: as `MIXED_ADAM`, but gradients are accumulated in fp32.

Source: Megatron Core user guide, Distributed Optimizer, row "float16 param, fp32 grads": 18, and 6 + 12/d.
"""

FP32_ADAM: Final = TextbookStates(weights_bytes=4, grads_bytes=4, optimizer_bytes=8)
"""16 bytes: everything fp32; momentum and variance, no copy of the weights.

Source: Megatron Core user guide, Distributed Optimizer, row "fp32 param, fp32 grads": 16, and 8 + 8/d.
"""


def states(
    n_parameters: float, *, zero: int = 0, dp: int = 1, per_parameter: TextbookStates = MIXED_ADAM
) -> TextbookStates:
    """Model states of one GPU under ZeRO: a state is whole, or a 1/N_d share of it.

    zero 0: (2 + 2 + K) Psi; 1: 2 Psi + 2 Psi + K Psi / N_d; 2: 2 Psi + (2 + K) Psi / N_d;
    3: (2 + 2 + K) Psi / N_d, with the convention's bytes in place of 2, 2, K.

    Assumes: every parameter is divided evenly.
    Neglects: padding, gathered weights, buckets, activations.
    Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, Figure 1 and section 5.

    >>> [round(states(7.5e9, zero=z, dp=64).total_bytes / 1e9, 1) for z in (0, 1, 2, 3)]
    [120.0, 31.4, 16.6, 1.9]

    Raises:
        InvalidValue: zero outside 0 to 3, or dp below 1.
    """
    zero = checked_count("zero", zero, least=0, most=3)
    dp = checked_count("dp", dp)
    return TextbookStates(
        weights_bytes=per_parameter.weights_bytes * n_parameters / (dp if zero >= 3 else 1),
        grads_bytes=per_parameter.grads_bytes * n_parameters / (dp if zero >= 2 else 1),
        optimizer_bytes=per_parameter.optimizer_bytes * n_parameters / (dp if zero >= 1 else 1),
    )


# --- Traffic ----------------------------------------------------------------------------------------------


def data_parallel_traffic_elements(n_parameters: float, *, zero: int = 0) -> float:
    """Elements one GPU sends in a step for data parallelism.

    zero 0: 2 Psi (all-reduce = reduce-scatter Psi + all-gather Psi); 1 and 2: 2 Psi (reduce-scatter the
    gradients, all-gather the weights); 3: 3 Psi (all-gather the weights in forward and again in backward,
    reduce-scatter the gradients).

    Assumes: one micro-batch a step.
    Neglects: the factor (N_d - 1) / N_d of a ring.
    Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 7.

    >>> [data_parallel_traffic_elements(1, zero=z) for z in (0, 1, 2, 3)]
    [2, 2, 2, 3]

    Raises:
        InvalidValue: zero outside 0 to 3.
    """
    return (3 if checked_count("zero", zero, least=0, most=3) == 3 else 2) * n_parameters


# --- Activations of one layer -----------------------------------------------------------------------------


def layer_activations_bytes(
    *,
    seq_len: int,
    micro_batch: int,
    d_model: int,
    n_heads: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
) -> float:
    """Activations of one layer, on one of t tensor ranks.

    | recompute | tensor parallelism          | and sequence parallelism |
    |-----------|-----------------------------|--------------------------|
    | none      | sbh (10 + 24/t + 5as/(ht))  | (sbh/t) (34 + 5as/h)     |
    | selective | sbh (10 + 24/t)             | 34 sbh/t                 |
    | full      | 2sbh                        | 2sbh/t                   |

    Without tensor parallelism LayerNorms, their inputs and the dropouts after attention and feed-forward (10
    of the 34) are replicated. "selective" recomputes attention's core, "full" all but the layer's input.

    Assumes: 16-bit activations, 1-byte dropout masks, a feed-forward width of 4h with GELU, attention scores
        kept (no flash attention); gathered inputs are gathered again in backward.
    Neglects: the mean and variance of LayerNorm (2sb each, small beside sbh); a recomputed layer's own
        activations, alive while its backward runs.
    Source: Korthikanti et al. 2022, arXiv:2205.05198, equations 1, 2, 4 and Table 2.

    >>> sizes = {"seq_len": 2, "micro_batch": 1, "d_model": 10, "n_heads": 2}
    >>> layer_activations_bytes(**sizes, tp=2)  # 20 (10 + 12 + 1)
    460.0
    >>> layer_activations_bytes(**sizes, tp=2, sequence_parallel=True)  # 10 (34 + 2)
    360.0
    >>> [layer_activations_bytes(**sizes, tp=2, recompute=how) for how in ("selective", "full")]
    [440.0, 40]
    """
    sbh = seq_len * micro_batch * d_model
    match recompute, sequence_parallel:
        case "none", False:
            return sbh * (10 + 24 / tp + 5 * n_heads * seq_len / (d_model * tp))
        case "none", True:
            return sbh / tp * (34 + 5 * n_heads * seq_len / d_model)
        case "selective", False:
            return sbh * (10 + 24 / tp)
        case "selective", True:
            return 34 * sbh / tp
        case _:
            return 2 * sbh / tp if sequence_parallel else 2 * sbh


def input_output_activations_bytes(
    *, seq_len: int, micro_batch: int, d_model: int, vocab_size: int, tp: int = 1, pp: int = 1
) -> float:
    """The first stage's activations outside the layers: sbhp/t, and on one stage (4sbh/t) (1 + v/h) more.

    sbhp/t: the embedding's dropout masks of p micro-batches. With p = 1 the stage is also the last: LayerNorm
    and output layer keep 2sbh/t each, the cross-entropy the fp32 logits, 4sbv/t.

    Assumes: tensor and sequence parallelism over the same t ranks.
    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.3.

    >>> input_output_activations_bytes(seq_len=2, micro_batch=1, d_model=10, vocab_size=50)  # 20 + 80 (1 + 5)
    500.0
    >>> input_output_activations_bytes(seq_len=2, micro_batch=1, d_model=10, vocab_size=50, pp=4)
    80.0
    """
    sbh = seq_len * micro_batch * d_model
    outputs = 4 * sbh / tp * (1 + vocab_size / d_model) if pp == 1 else 0.0
    return sbh * pp / tp + outputs


# --- A plan -----------------------------------------------------------------------------------------------


def bytes_per_parameter(plan: Plan) -> TextbookStates:
    """The convention for a plan's precision and optimizer.

    fp32: 4 + 4 + 4 a moment; mixed: 2 + 2, an fp32 copy of the weights and 4 a moment; bf16: 2 + 2 + 2
    a moment. With Adam's two moments these are `FP32_ADAM`, `MIXED_ADAM` and 2 + 2 + 4.

    Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 3.1, for Adam; others keep fewer moments.

    >>> [bytes_per_parameter(Plan(precision=p)).total_bytes for p in ("fp32", "bf16-mixed", "bf16")]
    [16, 16, 8]
    """
    weights, stored = plan.formats.compute.itemsize, plan.formats.stored.itemsize
    copy = stored if plan.mixed else 0
    return TextbookStates(
        weights_bytes=weights, grads_bytes=weights, optimizer_bytes=copy + stored * len(plan.kept.moments)
    )


def stage_parameters(model: Model, plan: Plan) -> float:
    """Parameters of one pipeline stage on one tensor rank: Psi / (p t).

    Assumes: embedding and head are spread over the stages like everything else.
    """
    return parameter_count(model) / (plan.pp * plan.tp)


def stage_activations_bytes(model: Decoder, plan: Plan, pp_rank: int) -> float:
    """Activations of a pipeline stage: its layers' times the micro-batches alive, and the ends it owns.

    1F1B keeps p - i micro-batches on stage i (of m, if that is fewer), GPipe all m. The first
    `recompute_blocks` layers are recomputed, the others not. The last stage adds
    (4sbh/t) (1 + v/h), the first sb h/t per micro-batch alive.

    Assumes: as `layer_activations_bytes` and `input_output_activations_bytes`, whatever the model and the
        precision.
    Source: Korthikanti et al. 2022, arXiv:2205.05198, sections 4.2.3 and 4.3, which give the first stage.
    """
    order = plan.pipeline_schedule.order(plan.pp, pp_rank, 1, plan.n_micro_batches)
    (before_backward,), _ = under_way(order, 1, plan.n_micro_batches)
    alive = before_backward if plan.pp > 1 else 1
    layers = len(stage_layers(model.n_layers, plan, pp_rank))
    recomputed = layers if plan.recompute_blocks is None else min(layers, plan.recompute_blocks)
    sizes = {"seq_len": plan.seq_len, "micro_batch": plan.micro_batch, "d_model": model.d_model}
    ends = {**sizes, "vocab_size": model.vocab_size, "tp": plan.tp}
    inputs = input_output_activations_bytes(**ends, pp=2) / 2
    outputs = input_output_activations_bytes(**ends, pp=1) - inputs

    def layer(recompute: Recompute) -> float:
        split = plan.sequence_parallel
        heads: dict[str, int] = {**sizes, "n_heads": model.n_heads, "tp": plan.tp}
        return layer_activations_bytes(**heads, sequence_parallel=split, recompute=recompute)

    kept = alive * (recomputed * layer(plan.recompute) + (layers - recomputed) * layer("none"))
    return kept + (alive * inputs if pp_rank == 0 else 0) + (outputs if pp_rank == plan.pp - 1 else 0)


def traffic(model: Decoder, plan: Plan, pp_rank: int) -> Iterator[Collective]:
    """The collectives that the papers count.

    Data axis: gradients all-reduced (zero 0); reduced and the weights gathered (1, 2); weights gathered twice
    and gradients reduced (3). Tensor axis: four all-reduces of sbh per layer and micro-batch, or with
    sequence parallelism four all-gathers and four reduce-scatters. Pipeline: sbh per micro-batch.

    Neglects: the ends' traffic on the tensor axis.
    Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 7; Korthikanti et al. 2022, arXiv:2205.05198,
        section 4.2.2; Narayanan et al. 2021, arXiv:2104.04473, section 3.2.
    """
    m, layers = plan.n_micro_batches, len(stage_layers(model.n_layers, plan, pp_rank))
    psi_bytes = bytes_per_parameter(plan).weights_bytes * stage_parameters(model, plan)
    boundary_bytes = 2 * plan.seq_len * plan.micro_batch * model.d_model
    if plan.dp > 1 and plan.zero == 0:
        yield _sent("all_reduce", "dp", "gradients", 1, psi_bytes)
    if plan.dp > 1 and plan.zero > 0:
        gathers = 2 if plan.zero == 3 else 1
        yield _sent("all_gather", "dp", "weights", gathers, psi_bytes)
        yield _sent("reduce_scatter", "dp", "gradients", 1, psi_bytes)
    if plan.tp > 1:
        n = 4 * layers * m
        kinds: tuple[CollectiveKind, ...] = ("all_reduce",)
        if plan.sequence_parallel:
            kinds = "all_gather", "reduce_scatter"
        for kind in kinds:
            yield _sent(kind, "tp", "activations and gradients", n, boundary_bytes)
    if pp_rank < plan.pp - 1:
        yield _sent("send", "pp", "activations", m, boundary_bytes)
    if pp_rank > 0:
        yield _sent("send", "pp", "activation gradients", m, boundary_bytes)


def _sent(kind: CollectiveKind, axis: Group, what: str, calls: int, payload_bytes: float) -> Collective:
    return Collective(kind=kind, axis=axis, what=what, calls=calls, payload_bytes=round(payload_bytes))


def forward_flops(model: Model, plan: Plan) -> float:
    """FLOPs of one GPU's forward passes in a step: 2 for each of its parameters and tokens.

    Neglects: attention scores.
    Source: Kaplan et al. 2020, arXiv:2001.08361, equation 2.2.
    """
    return 2 * stage_parameters(model, plan) * plan.n_micro_batches * plan.micro_batch * plan.seq_len


def recomputed_flops(model: Decoder, plan: Plan, pp_rank: int) -> float:
    """The part of a GPU's `forward_flops` that is recomputed: its recomputed layers' share.

    Neglects: attention's core, which "selective" computes again, as `forward_flops` does.
    Source: Narayanan et al. 2021, arXiv:2104.04473, appendix: one more forward pass.
    """
    layers = len(stage_layers(model.n_layers, plan, pp_rank))
    if plan.recompute != "full" or not layers:
        return 0.0
    recomputed = layers if plan.recompute_blocks is None else min(layers, plan.recompute_blocks)
    return forward_flops(model, plan) * recomputed / layers


def step(model: Decoder, plan: Plan, pp_rank: int, grads: Buffer) -> Iterator[Event]:
    """The formulas' step: one instant at which everything is alive, the computation, and the collectives.

    Bytes are rounded to whole numbers.
    """
    activations = _bytes("activations", stage_activations_bytes(model, plan, pp_rank))
    yield from allocs(grads, activations)
    work: dict[Phase, float] = {
        "forward": forward_flops(model, plan),
        "backward": 2 * forward_flops(model, plan),
        "recompute": recomputed_flops(model, plan, pp_rank),
    }
    for phase, flops in work.items():
        yield Compute(kind=ComputeKind.UNKNOWN, phase=phase, flops=round(flops), shape=(), dtype=BF16)
    yield from traffic(model, plan, pp_rank)
    yield from frees(grads, activations)


def _bytes(kind: Kind, n_bytes: float) -> Buffer:
    return Buffer(f"textbook {kind}", (round(n_bytes),), UINT8, round(n_bytes), kind)


# --- What the formulas do not cover -----------------------------------------------------------------------

SUPPORTED_VALUES: Final[dict[str, tuple[Any, ...]]] = {
    "virtual_stages": (1,),
    "schedule": ("gpipe", "1f1b"),
    "layers_per_stage": (None,),
    "offload": (False,),
    "clip_grad_norm": (None,),
    "loss_chunks": (1,),
}
"""The values of options that the formulas cover; options that are not listed may have any."""


def _decoder(model: Model) -> Decoder:
    """The model itself, if the papers' formulas cover it.

    Raises:
        MissingRule: blocks of several kinds, or sizes of another kind than the formulas have.
    """
    if not isinstance(model, Decoder):
        raise MissingRule(
            f"the closed forms are for decoders of equal blocks, and {model.name} is of the family "
            f"{model.family}; use engine='torch'.",
            kind="a model that the closed forms are not about",
        )
    return model


def _check_heads(model: Model, plan: Plan) -> None:
    check_divided(plan, {"n_heads": _decoder(model).n_heads})


def _check_options(model: Model, plan: Plan) -> None:
    for option, supported in SUPPORTED_VALUES.items():
        value = getattr(plan, option)
        if value not in supported:
            raise MissingRule(
                f"{option}={value!r} has no rule yet in the textbook engine; use "
                f"{' or '.join(map(repr, supported))}.",
                kind="options that the engine has no rule for",
            )


REFUSALS: Final[tuple[Rule, ...]] = (
    _check_heads,
    check_sequence,
    check_layers,
    check_positions,
    _check_options,
)
"""The checks of a plan under the formulas: fewer than the torch engine's."""


@final
class TextbookEngine(Engine):
    """The formulas above as an engine: weights and optimizer state at rest, one instant in a step."""

    name = "textbook"
    is_accounting = True
    axes = "pp", "dp", "tp"
    refusals = REFUSALS
    assumes = (
        "The papers' closed forms (dropout, d_ff = 4 d_model, attention scores kept,\n"
        "16-bit activations; no buffers): for teaching and for checking formulas."
    )

    def play(self, model: Model, plan: Plan, device: Device) -> Iterator[RankRecord]:
        for pp_rank in range(plan.pp):
            yield self.play_rank(model, plan, Rank(pp=pp_rank), device)

    def play_rank(
        self, model: Model, plan: Plan, rank: Rank, device: Device, backend: Backend | None = None
    ) -> RankRecord:
        model = _decoder(model)
        psi, per_parameter = stage_parameters(model, plan), bytes_per_parameter(plan)
        kept = states(psi, zero=plan.zero, dp=plan.dp, per_parameter=per_parameter)
        weights, optimizer = _bytes("weights", kept.weights_bytes), _bytes("optimizer", kept.optimizer_bytes)
        grads = _bytes("grads", kept.grads_bytes)
        return RankRecord(
            rank=rank,
            layers=(stage_layers(model.n_layers, plan, rank.pp),),
            rest=Alive({weights: 1, optimizer: 1}),
            step=events("everything at once", step(model, plan, rank.pp, grads)),
            grads=Alive({grads: 1}),
        )

    def wire_bytes(self, kind: CollectiveKind, payload_bytes: int, n_ranks: int) -> int:
        """A ring's factor (n-1)/n is neglected: an all-reduce sends twice its payload, all others theirs."""
        return payload_bytes * (2 if kind == "all_reduce" else 1)


TEXTBOOK = TextbookEngine()
