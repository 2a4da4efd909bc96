"""Laws that hold for any model and plan, whatever the numbers.

Small models of both families under every kind of plan, on both devices. The laws are about bytes, so none of
them has a tolerance.
"""

import re
from ast import literal_eval
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import Any, Final, NamedTuple, final

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from memplan import Gpt, Llama, Plan, cluster, estimate, parameter_count
from memplan.device import CPU, H100, Device
from memplan.engines.checks import check_plan
from memplan.engines.options import plan_of, with_said
from memplan.engines.torch import RankStages
from memplan.engines.torch.options import DDP_COMM_HOOKS, FSDP_UNITS, OPTIMIZER_IMPLS, torch_options
from memplan.engines.torch.pipelining import left_behind
from memplan.engines.torch.sharding import padded_shard_elements
from memplan.engines.torch.units import Row, grouped
from memplan.errors import ContradictoryEstimate, MissingRule, PlanRefused
from memplan.estimate import StageEstimate, estimate_plan, rank_estimate
from memplan.memory import n_bytes_of, running_bytes
from memplan.models import Decoder, Layers, Model, preset
from memplan.optimizers import COMMON
from memplan.passes.trace import Segment
from memplan.plan import (
    RECOMPUTES,
    Rank,
)
from memplan.precisions import PRECISIONS
from memplan.record import Alloc, Free, Stretch, changes, events, unrolled
from memplan.schedules import SCHEDULES
from memplan.shapes import FP32, Buffer, buffer_of
from memplan.tape import CPU_RNG_STATE_BYTES, Tensor
from memplan.testing import check_laws


def laws(max_examples: int) -> settings:
    """The same examples every time, so that a failure is the change's and not the day's."""
    return settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )


class Case(NamedTuple):
    """A model under a plan, one pipeline stage of it, on a device."""

    model: Decoder
    plan: Plan
    stage: int
    device: Device

    def on(self, dp_rank: int = 0, tp_rank: int = 0, **changes: Any) -> StageEstimate:
        """The estimate of one rank of the stage, with changes to the plan."""
        rank = Rank(pp=self.stage, dp=dp_rank, tp=tp_rank)
        return rank_estimate(self.model, with_said(self.plan, **changes), rank, self.device)

    def of(self, **changes: Any) -> RankStages:
        """The engine's own view of the stage's first rank."""
        return RankStages(self.model, with_said(self.plan, **changes), Rank(pp=self.stage), self.device)

    def held_bytes(self, **changes: Any) -> int:
        """Weights, gradients and optimizer state of the data-parallel rank that holds most of them."""
        n = changes.get("dp", self.plan.dp)
        return max(on_device_bytes(self.on(dp_rank, **changes)) for dp_rank in range(n))


def on_device_bytes(rank: StageEstimate) -> int:
    """States but for Adam's step counts that are the host's."""
    return rank.states.total_bytes - n_bytes_of(rank.record.step_counts)


@st.composite
def models(draw: st.DrawFn) -> Decoder:
    kv_heads, group, d_head = draw(st.sampled_from([(1, 1, 4), (1, 2, 2), (2, 1, 6), (2, 2, 2), (4, 1, 2)]))
    fields: dict[str, Any] = {
        "name": "any",
        "n_layers": draw(st.integers(1, 6)),
        "d_model": kv_heads * group * d_head,
        "n_heads": kv_heads * group,
        "d_ff": draw(st.sampled_from([2, 8, 11, 12])),
        "vocab_size": draw(st.sampled_from([4, 7, 30, 64])),
        "max_seq_len": 16,
        "tied_head": draw(st.booleans()),
    }
    if draw(st.booleans()):
        return Gpt(**fields, dropout=draw(st.sampled_from([0.0, 0.1])))
    fields |= {"attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans())}
    return Llama(**fields, n_kv_heads=kv_heads)


PLAIN_DDP: Final = {
    "gradient_as_bucket_view": st.just(False),
    "bucket_cap_bytes": st.none(),
    "ddp_comm_hook": st.just("none"),
}
"""DDP's options at their defaults."""


@st.composite
def cases(draw: st.DrawFn, /, **fixed: st.SearchStrategy[Any]) -> Case:
    """Cases that can run; a field of the plan, or the device, is drawn from the caller's strategy if any."""
    model = draw(models())

    def field(name: str, otherwise: st.SearchStrategy[Any]) -> Any:
        return draw(fixed.get(name, otherwise))

    dp, tp = field("dp", st.integers(1, 4)), field("tp", st.sampled_from([1, 2, 4]))
    pp = field("pp", st.integers(1, min(model.n_layers, 4)))
    if pp > 1:
        model = replace(model, tied_head=False)
    micro_batch = draw(st.integers(1, 3))
    zero = field("zero", st.integers(0, 3) if dp > 1 else st.just(0))
    fsdp = {
        "dp_replicate": field("dp_replicate", st.sampled_from([1, 1, 2])),
        "fsdp_units": field("fsdp_units", st.sampled_from(FSDP_UNITS)),
        "offload": field("offload", st.booleans()),
    }
    if fsdp["fsdp_units"] != "model":
        fsdp["fsdp_blocks"] = field("fsdp_blocks", st.sampled_from([1, 1, 2, 3]))
    ddp = {
        "gradient_as_bucket_view": field("gradient_as_bucket_view", st.booleans()),
        "bucket_cap_bytes": field("bucket_cap_bytes", st.sampled_from([None, 100, 2000])),
        "ddp_comm_hook": field("ddp_comm_hook", st.sampled_from(DDP_COMM_HOOKS)),
    }
    chosen = {
        "zero": zero,
        **(fsdp if zero >= 2 else {}),
        **(ddp if zero <= 1 < dp else {}),
        "sequence_parallel": draw(st.booleans()) if tp > 1 else False,
        "seq_len": draw(st.sampled_from([4, 8, 16])),
        "precision": field("precision", st.sampled_from(tuple(PRECISIONS.own))),
        "optimizer": field("optimizer", st.sampled_from(COMMON)),
        "optimizer_impl": field("optimizer_impl", st.sampled_from(OPTIMIZER_IMPLS)),
        "clip_grad_norm": field("clip_grad_norm", st.sampled_from([None, 1.0])),
        "set_to_none": field("set_to_none", st.booleans()),
        "recompute": field("recompute", st.sampled_from(RECOMPUTES)),
        "recompute_blocks": draw(st.sampled_from([None, 1, 2])),
        "schedule": field("schedule", st.sampled_from(tuple(SCHEDULES.own) if pp > 1 else ("1f1b",))),
        "loss_chunks": field("loss_chunks", st.integers(1, 4)),
    }
    if chosen["recompute"] == "none":
        del chosen["recompute_blocks"]
    if pp > 1 and not SCHEDULES.named(chosen["schedule"]).single_stage:
        chosen["virtual_stages"] = draw(st.integers(1, max(1, model.n_layers // pp)))
    least = {"1f1b": pp, "dualpipe-v": 2 * pp}.get(chosen["schedule"], 1)
    n_micro_batches = draw(st.integers(least, least + 5))
    plan = plan_of(
        dp=dp,
        tp=tp,
        pp=pp,
        micro_batch=micro_batch,
        global_batch=chosen.get("dp_replicate", 1) * dp * micro_batch * n_micro_batches,
        **chosen,
    )
    device = field("device", st.sampled_from([CPU, H100]))
    assume(runs(model, plan, device))
    return Case(model, plan, draw(st.integers(0, pp - 1)), device)


def runs(model: Decoder, plan: Plan, device: Device) -> bool:
    try:
        check_plan(model, plan, device)
    except (PlanRefused, MissingRule):
        return False
    return True


def one_by_one(stretch: Stretch) -> Iterator[Alloc | Free]:
    """Every event of a step, unrolled."""
    for _ in range(stretch.repeats):
        yield from changes(stretch.events)
        for part in stretch.parts:
            yield from one_by_one(part)


def some_rank(case: Case) -> StageEstimate:
    """The last rank of the stage: its shards are the uneven ones."""
    return case.on(case.plan.dp - 1, case.plan.tp - 1)


@laws(200)
@given(cases())
def test_the_laws_of_every_engine_hold(case):
    """On a GPU with a cluster, whose rates give a step time and bounds."""
    n = case.plan.world_size
    with_times = not case.device.on_cpu and (n <= 8 or n % 8 == 0)
    where = cluster(f"{n}xh100-sxm") if with_times else None
    check_laws(estimate_plan(case.model, case.plan, where, None if where else case.device.type))


# The peak


@laws(200)
@given(cases())
def test_the_closed_form_is_the_unrolled_steps_maximum(case):
    rank = some_rank(case)
    held = [
        rank.rest_bytes,
        *(held_bytes for _, held_bytes in running_bytes(rank.record.step, rank.rest_bytes)),
    ]
    left_bytes = sum(n * buffer.n_bytes for buffer, n in left_behind(case.of()).items())
    assert rank.peak_bytes == max(held)
    assert min(held) == rank.rest_bytes - left_bytes


# The step


@laws(200)
@given(cases())
def test_a_step_leaves_its_gradients_and_nothing_else(case):
    """zero_grad frees them after the step. FSDP2's are views of whole reduced shards, padding and all.

    Offloaded ones are the host's; zeroed ones and views of DDP's buckets were there before the step.
    """
    plan, rank = case.plan, some_rank(case)
    left: Counter[Buffer] = Counter()
    for event in one_by_one(rank.record.step):
        left[event.buffer] += event.sign
    if (
        rank.record.host is not None
        or not torch_options(plan).set_to_none
        or torch_options(plan).gradient_as_bucket_view
    ):
        assert not any(left.values())
        return
    assert {buffer.kind for buffer, n in left.items() if n} == {"grads"}
    if plan.zero < 2:
        grads_bytes = rank.states.grads_bytes
    else:
        stage = case.of()
        counted = stage.counted_parameters
        grads_bytes = stage.weight_dtype.itemsize * sum(
            n * padded_shard_elements(parameter, plan.dp) for parameter, n in counted
        )
        assert grads_bytes >= rank.states.grads_bytes
    assert sum(n * buffer.n_bytes for buffer, n in left.items()) == grads_bytes


@laws(80)
@given(cases())
def test_more_micro_batches_never_lower_the_peak(case):
    """Interleaved schedules go in rounds of at least pp micro-batches, but shorter ones where it divides."""
    plan = case.plan
    a_round = plan.pp if plan.schedule in ("interleaved-1f1b", "zero-bubble") else 1
    assume(plan.n_micro_batches % a_round == 0)
    more = plan.global_batch + plan.n_replicas * plan.micro_batch * a_round
    assert case.on(global_batch=more).peak_bytes >= case.on().peak_bytes


@laws(80)
@given(cases(pp=st.integers(2, 4), schedule=st.just("1f1b")))
def test_1f1b_needs_no_more_for_more_micro_batches_but_the_batch_itself_and_its_losses(case):
    plan = case.plan
    per_micro_batch = plan.n_replicas * plan.micro_batch
    first, second = ((2 * plan.pp + 3 + more) * per_micro_batch for more in (0, 3))
    of_step = [
        rank.peak_bytes - rank.rest_bytes for n in (first, second) for rank in [case.on(global_batch=n)]
    ]
    losses = 3 if case.of().last else 0
    assert of_step[1] - of_step[0] == losses * FP32.itemsize


@laws(80)
@given(
    cases(pp=st.integers(2, 4), zero=st.just(0), schedule=st.just("1f1b"), device=st.just(H100)),
)
def test_1f1b_needs_at_most_a_gradient_that_is_sent_more_than_gpipe(case):
    """`Schedule1F1B` still names the last micro-batch's (`bwd_sends`) while the next one goes back."""
    stage, *_ = case.of()
    sent_bytes = 0 if stage.first else stage.trace.boundary_grad.n_bytes
    assert case.on().peak_bytes <= case.on(schedule="gpipe").peak_bytes + sent_bytes


@laws(80)
@given(cases(recompute=st.just("none")))
def test_recomputation_keeps_a_blocks_output_and_nothing_else(case):
    """On CPU the generator's state too."""

    def kept_bytes(recompute: str) -> int:
        stage, *_ = case.of(recompute=recompute)
        block = stage.blocks[0][0]
        return events("block", (*block.forward.events, *block.casts.events)).net_bytes

    random_state_bytes = CPU_RNG_STATE_BYTES if case.device.on_cpu else 0
    stage, *_ = case.of()
    assert kept_bytes("full") - random_state_bytes == stage.trace.boundary.n_bytes
    assert kept_bytes("full") - random_state_bytes < kept_bytes("none")
    assert kept_bytes("full") < kept_bytes("selective")


@laws(80)
@given(cases(recompute=st.sampled_from(["selective", "full"])))
def test_recomputing_the_first_blocks_is_between_none_and_all(case):
    """Each block keeps as much as it would alone, whatever its neighbours do."""
    most = max(stage.n_blocks for stage in case.of())

    def kept_bytes(**plan: Any) -> list[int]:
        return [
            sum(n * events("block", block.forward.events).net_bytes for block, n in stage.blocks)
            for stage in case.of(**plan)
        ]

    every = kept_bytes(recompute_blocks=None)
    none = kept_bytes(recompute="none", recompute_blocks=None)
    for k in range(1, most + 1):
        some = kept_bytes(recompute_blocks=k)
        for stage, kept, whole, nothing in zip(case.of(), some, every, none, strict=True):
            n, first = stage.n_blocks, min(k, stage.n_blocks)
            assert n * kept == first * whole + (n - first) * nothing
    assert case.on(recompute_blocks=most).peak_bytes == case.on(recompute_blocks=None).peak_bytes


# Kinds of blocks


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled(Model):
    """A model whose blocks have other names: as if they were of several kinds."""

    model: Decoder
    labels: str

    @property
    def layers(self) -> tuple[Layers, ...]:
        return tuple(Layers(kind, len(list(same))) for kind, same in groupby(self.labels))

    @property
    def longest_seq_len(self) -> int | None:
        return self.model.longest_seq_len

    def buffers(self, seq_len: int) -> tuple[Buffer, ...]:
        return self.model.buffers(seq_len)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.embed(tokens)

    def block(self, x: Tensor, kind: str) -> Tensor:
        return self.model.block(x, kind)

    def head(self, x: Tensor) -> Tensor:
        return self.model.head(x)


def in_bytes(rank: StageEstimate) -> tuple[Any, ...]:
    """All figures of a rank, without names."""
    alive = Counter[tuple[str, int]]()
    for buffer, n in rank.alive.items():
        alive[buffer.kind, buffer.n_bytes] += n
    sent = Counter[tuple[str, str]]()
    for c in rank.collectives:
        sent[c.kind, c.axis] += c.calls
    return rank.peak_bytes, rank.rest_bytes, rank.states, alive, sent, rank.flops, rank.recomputed_flops


def freed_before_made(rank: StageEstimate) -> set[str]:
    """Buffers that are freed, at some instant, although none of them is alive."""
    alive, found = Counter(rank.record.rest), set()
    for _, event in unrolled(rank.record.step):
        if isinstance(event, Alloc):
            alive[event.buffer] += 1
        elif isinstance(event, Free):
            alive[event.buffer] -= 1
            found |= {event.buffer.name} if alive[event.buffer] < 0 else set()
    return found


@laws(200)
@given(cases(), st.text("ab", min_size=6, max_size=6))
def test_blocks_of_several_kinds_are_planned_as_blocks_of_one(case, labels):
    """Equal blocks hold, send and compute the same if they go by different names."""
    model = case.model
    sizes = {"name": model.name, "d_model": model.d_model, "max_seq_len": model.max_seq_len}
    labelled = Labelled(**sizes, model=model, labels=labels[: model.n_blocks])
    other = rank_estimate(labelled, case.plan, case.on().rank, case.device)
    assert in_bytes(other) == in_bytes(case.on())
    assert freed_before_made(other) == freed_before_made(case.on())
    if case.on().replayed is not None:
        assert other.replayed.reserved_bytes == case.on().replayed.reserved_bytes


# Sharding


@laws(80)
@given(cases(dp=st.integers(2, 4), zero=st.just(0), **PLAIN_DDP))
def test_more_sharding_never_holds_more_states(case):
    held = [
        case.held_bytes(zero=zero)
        for zero in range(4)
        if runs(case.model, replace(case.plan, zero=zero), case.device)
    ]
    assert held == sorted(held, reverse=True)


@laws(80)
@given(cases())
def test_twice_the_data_ranks_never_hold_more_states(case):
    twice = {"dp": 2 * case.plan.dp, "global_batch": 2 * case.plan.global_batch}
    assume(runs(case.model, with_said(case.plan, **twice), case.device))
    assert case.held_bytes(**twice) <= case.held_bytes()


@laws(80)
@given(cases(dp=st.integers(2, 4), zero=st.sampled_from([2, 3])))
def test_fsdp_shards_cover_the_whole(case):
    shards = [case.on(dp).states for dp in range(case.plan.dp)]
    stage = case.of()
    whole_bytes = stage.weight_dtype.itemsize * sum(n * p.n_elements for p, n in stage.counted_parameters)
    assert sum(states.weights_bytes for states in shards) == whole_bytes
    assert sum(states.grads_bytes for states in shards) == whole_bytes


@laws(80)
@given(cases(dp=st.integers(2, 4), zero=st.just(1)))
def test_zero_1_divides_the_optimizer_state_and_nothing_else(case):
    ranks = [case.on(dp).states for dp in range(case.plan.dp)]
    whole = case.on(zero=0).states
    assert sum(states.optimizer_bytes for states in ranks) == whole.optimizer_bytes
    assert {(r.weights_bytes, r.grads_bytes) for r in ranks} == {(whole.weights_bytes, whole.grads_bytes)}


@laws(80)
@given(cases(tp=st.sampled_from([2, 4])))
def test_tensor_ranks_divide_some_weights_and_repeat_the_others(case):
    divided, whole = (
        stage.counted_parameters for stage in (case.of(), case.of(tp=1, sequence_parallel=False))
    )
    for (part, n_part), (parameter, n) in zip(divided, whole, strict=True):
        times = case.plan.tp if part.is_divided else 1
        assert (part.name, n_part) == (parameter.name, n)
        assert part.n_elements * times == parameter.n_elements


@laws(80)
@given(cases(tp=st.just(1), zero=st.sampled_from([0, 1]), dp=st.integers(2, 3)))
def test_pipeline_stages_cover_the_model(case):
    itemsize = case.plan.formats.stored.itemsize
    stages = [case._replace(stage=stage).on() for stage in range(case.plan.pp)]
    assert sum(s.states.weights_bytes for s in stages) == itemsize * parameter_count(case.model)
    layers = [layer for stage in stages for layers in stage.layers for layer in layers]
    assert sorted(layers) == list(range(case.model.n_layers))


@laws(200)
@given(cases(dp=st.integers(2, 4), zero=st.just(1), pp=st.just(1)))
def test_the_rank_that_stands_for_a_stage_holds_most_states(case):
    stage = case.of()
    fullest = stage.on_fullest_rank().rank
    assert on_device_bytes(case.on(fullest.dp)) == case.held_bytes()


# FSDP2's options


def shared(what: str, **fixed: Any) -> st.SearchStrategy[Case]:
    """Cases of FSDP2 where an option is at its default; `fixed` for others."""
    defaults: dict[str, Any] = {"dp_replicate": 1, "fsdp_units": "block", "offload": False}
    return cases(
        dp=st.integers(2, 4), zero=st.sampled_from([2, 3]), **{what: st.just(defaults[what])}, **fixed
    )


def replicated(case: Case, n: int) -> dict[str, Any]:
    return {"dp_replicate": n, "global_batch": n * case.plan.global_batch}


@laws(80)
@given(shared("dp_replicate"))
def test_replicas_of_shards_hold_the_shards_and_one_micro_batch_more_of_nothing(case):
    """An all-reduce is in place; only gradients that are added to older ones are kept to the end for it.

    On CPU the mesh has three times as many ranks, of 4 bytes each.
    """
    alone, beside = case.on(), case.on(**replicated(case, 3))
    more_ranks_bytes = 4 * 2 * case.plan.world_size if case.device.on_cpu else 0
    assert (beside.states, beside.rest_bytes) == (alone.states, alone.rest_bytes + more_ranks_bytes)
    assert beside.peak_bytes >= alone.peak_bytes
    keeps = torch_options(case.plan).set_to_none and (case.plan.n_micro_batches == 1 or case.plan.pp > 1)
    if keeps and not case.of().offloads:
        assert beside.peak_bytes == alone.peak_bytes + more_ranks_bytes


@laws(80)
@given(shared("dp_replicate"))
def test_replicas_of_shards_reduce_between_them_what_the_shards_have_reduced(case):
    alone = [c for c in case.on().collectives if c.axis != "world"]
    beside = [c for c in case.on(**replicated(case, 3)).collectives if c.axis != "world"]
    assert [c for c in beside if c.axis != "dp_replicate"] == alone
    (between,) = [c for c in beside if c.axis == "dp_replicate"]
    (scattered,) = [c for c in alone if c.kind == "reduce_scatter" and c.axis == "dp"]
    assert (between.kind, between.calls) == ("all_reduce", scattered.calls)
    assert between.payload_bytes * case.plan.dp == scattered.payload_bytes
    assert between.wire_bytes == 2 * between.payload_bytes * 2 // 3


@laws(80)
@given(shared("fsdp_units", fsdp_blocks=st.just(1)))
def test_larger_units_move_the_same_gradients_in_fewer_calls(case):
    assume(not case.model.tied_head)

    def moved(kind: str, units: str) -> tuple[int, int]:
        found = case.on(fsdp_units=units).collectives
        return next((c.calls, c.payload_bytes) for c in found if (c.kind, c.axis) == (kind, "dp"))

    for kind in ("reduce_scatter", "all_gather"):
        calls, payload_bytes = zip(*(moved(kind, units) for units in FSDP_UNITS), strict=True)
        block, ends, model = calls
        assert model <= block <= ends
        if kind == "reduce_scatter" or case.plan.zero == 2:
            assert len(set(payload_bytes)) == 1
        else:
            assert payload_bytes[1] >= payload_bytes[0] >= payload_bytes[2]


@laws(80)
@given(cases(dp=st.integers(2, 4), zero=st.sampled_from([2, 3]), fsdp_units=st.just("block")))
def test_blocks_that_share_a_unit_share_its_calls(case):
    def scattered(fsdp_blocks: int) -> tuple[int, int]:
        found = case.on(fsdp_blocks=fsdp_blocks).collectives
        return next((c.calls, c.payload_bytes) for c in found if (c.kind, c.axis) == ("reduce_scatter", "dp"))

    plan, stages = case.plan, case.of()
    passes = 1 if plan.pp > 1 else plan.n_micro_batches
    alone_calls, alone_bytes = scattered(1)
    ends = alone_calls // passes - sum(stage.n_blocks for stage in stages)
    for n in (2, 3):
        units = ends + sum(-(-stage.n_blocks // n) for stage in stages)
        assert scattered(n) == (passes * units, alone_bytes)


def test_every_block_passes_once_in_its_own_unit_whatever_the_groups():
    """In both directions, for every number of blocks and of those that share a unit, in runs of two kinds."""
    kinds = [Segment(), Segment(), Segment()]
    for n_blocks, size, n_first in product(range(1, 12), range(1, 6), range(3)):
        runs = [(kinds[0], 1), (kinds[1], min(n_first, n_blocks - 1))]
        runs.append((kinds[2], n_blocks - 1 - runs[1][1]))
        whole, left = divmod(n_blocks, size)
        groups = [Row(None, size, whole), Row(None, left, 1 if left else 0)]
        for order, rows in ((runs, groups), (runs[::-1], groups[::-1])):
            expected = [id(segment) for segment, n in order for _ in range(n)]
            found, sizes = [], []
            for _, row, times in grouped(order, rows):
                found += [id(segment) for segment, n in row for _ in range(n)] * times
                sizes += [sum(n for _, n in row)] * times
            assert found == expected
            assert sizes == [group.size for group in rows for _ in range(group.times)]


@laws(80)
@given(shared("offload", device=st.just(H100)))
def test_offloaded_states_are_the_hosts_and_cross_to_the_device_as_they_are_needed(case):
    kept, offloaded = case.on(), case.on(offload=True)
    kinds = ("weights", "grads", "optimizer")
    assert {b.kind for b in offloaded.record.rest} <= {"activations", "temporaries"}
    assert not any(getattr(offloaded.peak, f"{kind}_bytes") for kind in kinds[::2])
    assert offloaded.states == kept.states
    for kind in kinds:
        assert getattr(offloaded.host, f"{kind}_bytes") == getattr(kept.states, f"{kind}_bytes")
    assert offloaded.host.weights_bytes + offloaded.host.grads_bytes <= offloaded.host_pinned_bytes
    assert kept.host.total_bytes == kept.host_pinned_bytes == 0
    assert [c for c in offloaded.collectives if c.axis != "host"] == list(kept.collectives)
    copied = {c.what: c.payload_bytes for c in offloaded.collectives if c.axis == "host"}
    gathered = sum(c.payload_bytes for c in kept.collectives if (c.kind, c.axis) == ("all_gather", "dp"))
    narrower = 2 if case.plan.mixed else 1
    assert copied["weights to the GPU"] * case.plan.dp == gathered * narrower
    fresh, added = (copied.get(what, 0) for what in ("gradients to the host", "gradients to be added"))
    reductions = 1 if case.plan.pp > 1 else case.plan.n_micro_batches
    assert fresh == (kept.states.grads_bytes if torch_options(case.plan).set_to_none else 0)
    assert fresh + added == reductions * kept.states.grads_bytes


@laws(80)
@given(shared("offload", device=st.just(CPU)))
def test_on_cpu_ranks_the_host_is_the_device(case):
    kept, offloaded = case.on(), case.on(offload=True)
    assert (offloaded.peak, offloaded.states, offloaded.collectives) == (
        kept.peak,
        kept.states,
        kept.collectives,
    )
    assert offloaded.host.total_bytes == 0


def test_one_unit_has_no_rows_of_blocks():
    with pytest.raises(PlanRefused, match=r"use fsdp_units='block' or 'block\+ends', or fsdp_blocks=1\.$"):
        check_plan(preset("gpt2"), plan_of(dp=2, zero=3, fsdp_units="model", fsdp_blocks=2))


def test_tied_ends_are_no_units_of_their_own():
    model = Gpt(
        name="any", n_layers=1, d_model=8, n_heads=2, d_ff=8, vocab_size=8, max_seq_len=8, tied_head=True
    )
    plan = plan_of(dp=2, zero=3, seq_len=8, fsdp_units="block+ends")
    with pytest.raises(PlanRefused, match=r"use fsdp_units='block' or 'model', or .* tied_head=False\.$"):
        check_plan(model, plan)
    for units in ("block", "model"):
        check_plan(model, with_said(plan, fsdp_units=units))


# Traffic


@laws(40)
@given(cases())
def test_every_rank_of_a_stage_issues_the_same_collectives(case):
    plan = case.plan
    ranks = [case.on(dp, tp) for dp in range(plan.dp) for tp in range(plan.tp)]
    issued = {tuple(c for c in rank.collectives if c.axis != "host") for rank in ranks}
    assert len(issued) == 1


@laws(80)
@given(cases(pp=st.integers(2, 4)))
def test_what_one_stage_sends_the_next_one_receives(case):
    def passed(stage: int, kind: str, what: str) -> list[tuple[int, int]]:
        found = case._replace(stage=stage).on().collectives
        return [(c.calls, c.payload_bytes) for c in found if (c.kind, c.axis, c.what) == (kind, "pp", what)]

    for stage in range(case.plan.pp - 1):
        for what, source, target in (
            ("activations", stage, stage + 1),
            ("activation gradients", stage + 1, stage),
        ):
            sent = passed(source, "send", what)
            assert len(sent) == 1
            assert sent == passed(target, "recv", what)


@laws(80)
@given(cases(dp=st.integers(2, 4), zero=st.sampled_from([0, 1]), ddp_comm_hook=st.just("none")))
def test_ddp_reduces_every_gradient_once(case):
    rank = case.on()
    reduced = [c.payload_bytes for c in rank.collectives if c.what == "all-reduce gradients"]
    assert reduced == [rank.states.grads_bytes]


# DDP's options


def replicas(**fixed: Any) -> st.SearchStrategy[Case]:
    return cases(dp=st.integers(2, 4), zero=st.sampled_from([0, 1]), **fixed)


@laws(80)
@given(replicas(gradient_as_bucket_view=st.just(True)))
def test_gradients_that_are_views_of_buckets_are_in_them_between_steps_and_nowhere_else(case):
    views, copies = case.on(), case.on(gradient_as_bucket_view=False)
    assert views.states == copies.states
    assert views.collectives == copies.collectives
    assert views.peak_bytes <= copies.peak_bytes
    zeroed = 0 if torch_options(case.plan).set_to_none else copies.states.grads_bytes
    assert views.rest_bytes == copies.rest_bytes - zeroed
    grads = [n * b.n_bytes for b, n in views.record.rest.items() if b.kind == "grads"]
    assert sum(grads) == views.states.grads_bytes


@laws(80)
@given(replicas(gradient_as_bucket_view=st.just(True), set_to_none=st.just(False)))
def test_zeroed_views_need_no_other_gradient_for_longer_than_their_own(case):
    freed = case.on(set_to_none=True)
    assert case.on().peak_bytes <= freed.peak_bytes
    assert case.on().rest_bytes == freed.rest_bytes


@laws(80)
@given(replicas(ddp_comm_hook=st.sampled_from(["fp16", "bf16"])))
def test_compression_reduces_two_bytes_for_every_element_and_keeps_nothing(case):
    plain, compressed = case.on(ddp_comm_hook="none"), case.on()
    elements = plain.states.grads_bytes // case.of().weight_dtype.itemsize
    (reduced,) = [c for c in compressed.collectives if c.what == "all-reduce gradients"]
    assert reduced.payload_bytes == 2 * elements
    assert reduced.calls == next(c.calls for c in plain.collectives if c.what == reduced.what)
    assert (compressed.states, compressed.rest_bytes) == (plain.states, plain.rest_bytes)
    assert plain.peak_bytes <= compressed.peak_bytes <= plain.peak_bytes + reduced.payload_bytes


@laws(80)
@given(replicas(ddp_comm_hook=st.just("powersgd")))
def test_powersgd_reduces_three_times_a_bucket_and_keeps_errors_and_factors(case):
    plain, low_rank = case.on(ddp_comm_hook="none"), case.on()
    before, reduced = (
        next(c for c in found.collectives if c.what == "all-reduce gradients") for found in (plain, low_rank)
    )
    assert reduced.calls == 3 * before.calls
    assert reduced.payload_bytes <= before.payload_bytes
    kept = low_rank.rest_bytes - plain.rest_bytes - workspaces(low_rank) + workspaces(plain)
    assert before.payload_bytes <= kept <= before.payload_bytes + reduced.payload_bytes
    assert low_rank.peak_bytes >= plain.peak_bytes + kept


def workspaces(rank) -> int:
    """Bytes of cuBLAS's workspaces."""
    return sum(n * buffer.n_bytes for buffer, n in rank.record.rest.items() if "workspace" in buffer.name)


# The update


@laws(80)
@given(cases(device=st.just(CPU)))
def test_one_kernel_holds_no_more_than_a_loop_or_lists(case):
    assume(case.plan.optimizer in ("adam", "adamw") and torch_options(case.plan).optimizer_impl == "fused")
    for other in ("for-loop", "foreach"):
        assert case.on().peak_bytes <= case.on(optimizer_impl=other).peak_bytes
        assert case.on().states == case.on(optimizer_impl=other).states


@laws(80)
@given(cases(set_to_none=st.just(False), gradient_as_bucket_view=st.just(False)))
def test_zeroed_gradients_stay_where_freed_ones_leave(case):
    zeroed, freed = case.on(), case.on(set_to_none=True)
    assert zeroed.states == freed.states
    sent, sent_freed = ([c for c in rank.collectives if c.axis != "host"] for rank in (zeroed, freed))
    assert sent == sent_freed
    assert zeroed.peak_bytes >= freed.peak_bytes
    if not case.of().offloads:
        assert zeroed.rest_bytes - freed.rest_bytes >= zeroed.states.grads_bytes


@laws(80)
@given(cases(precision=st.just("fp16-mixed")))
def test_float16_takes_what_bfloat16_takes_and_its_loss_scale_and_asks_for_overflows(case):
    half, brain = case.on(), case.on(precision="bf16-mixed")
    assert half.states == brain.states
    assert 0 <= half.peak_bytes - brain.peak_bytes <= 4 * FP32.itemsize
    asked = [c for c in half.collectives if c.what == "overflows"]
    assert [c for c in half.collectives if c not in asked] == list(brain.collectives)
    assert {c.payload_bytes / c.calls for c in asked} <= {4}
    assert bool(asked) == (case.plan.fsdp or case.plan.tp > 1 or case.plan.pp > 1)


@laws(80)
@given(cases(clip_grad_norm=st.just(1.0)))
def test_clipping_sends_norms_and_sums_partial_gradients_once_more(case):
    clipped, as_is = case.on(), case.on(clip_grad_norm=None)
    assert clipped.states == as_is.states
    assert clipped.peak_bytes >= as_is.peak_bytes
    norms = [c for c in clipped.collectives if c.what == "norms of gradients"]
    assert bool(norms) == (case.plan.fsdp or case.plan.tp > 1 or case.plan.pp > 1)
    n_parameters = sum(n for _, n in case.of().counted_parameters)
    assert all(c.payload_bytes <= 4 * n_parameters * c.calls for c in norms)


# Ways out

WAYS_OUT = {
    r"^global_batch=\d+ is not a multiple .*; use (\d+)\.$": "global_batch",
    r"use global_batch=(\d+)(?: or more)?\.$": "global_batch",
    r"^tp=\d+ does not divide .* use one of ([\d, ]+\d)": "tp",
    r"[ ,]tp=(\d+)(?:[,.]| or)": "tp",
    r"use seq_len=(\d+)\.$": "seq_len",
    r"^seq_len=\d+ is longer .* use (\d+) or less\.$": "seq_len",
    r"^pp=\d+ is more .* use at most (\d+)\.$": "pp",
    r"use pp=(\d+),": "pp",
    r"use pp of (\d+) or more,": "pp",
    r"use dp of (\d+) or more,": "dp",
    r"use tp of (\d+) or more,": "tp",
    r"use zero=(\d+) or": "zero",
    r"zero=\d+ or (\d+), tp": "zero",
    r"or zero=(\d+)\.$": "zero",
    r"sequence_parallel=(False)\.$": "sequence_parallel",
    r"model with tied_head=(False)\.$": "tied_head",
    r"use optimizer_impl=('[a-z-]+')": "optimizer_impl",
    r"or set_to_none=(True)\.$": "set_to_none",
    r"use sequence_parallel=(True),": "sequence_parallel",
    r", dp of (\d+) or more, or precision": "dp",
    r"or precision=('[a-z0-9-]+')\.$": "precision",
    r"use virtual_stages=(\d+)(?:\.| or)": "virtual_stages",
    r"or virtual_stages=(\d+)\.$": "virtual_stages",
    r"schedule=('[a-z0-9-]+')[.,]": "schedule",
    r"use zero=(\d), or schedule": "zero",
}
"""What a refusal offers, as its text says it, and the field that takes it."""


def offers(refusal: str) -> list[tuple[str, int | bool | str]]:
    """Every field and value that a refusal's way out names."""
    way_out = refusal[refusal.rindex("; use ") :]
    found: list[tuple[str, int | bool | str]] = []
    for pattern, field in WAYS_OUT.items():
        for match in re.finditer(pattern, refusal):
            if match.end() > len(refusal) - len(way_out):
                values = match.group(1).split(", ")
                found += [(field, literal_eval(value)) for value in values]
    return found


def refusal_of(model: Decoder, fields: dict[str, Any]) -> str:
    """Why a plan cannot run; empty if it can."""
    try:
        check_plan(replace(model, tied_head=fields["tied_head"]), drawn_plan(fields))
    except PlanRefused as refused:
        return str(refused)
    return ""


def drawn_plan(fields: dict[str, Any]) -> Plan:
    return plan_of(**{name: value for name, value in fields.items() if name != "tied_head"})


anything = st.fixed_dictionaries(
    {
        "dp": st.integers(1, 4),
        "tp": st.integers(1, 6),
        "pp": st.integers(1, 9),
        "zero": st.integers(0, 3),
        "sequence_parallel": st.booleans(),
        "micro_batch": st.integers(1, 3),
        "global_batch": st.integers(1, 20),
        "seq_len": st.integers(1, 20),
        "schedule": st.sampled_from(tuple(SCHEDULES.own)),
        "virtual_stages": st.sampled_from([1, 1, 2]),
        "precision": st.sampled_from(tuple(PRECISIONS.own)),
        "optimizer": st.sampled_from(COMMON),
        "optimizer_impl": st.sampled_from(OPTIMIZER_IMPLS),
        "set_to_none": st.booleans(),
        "tied_head": st.booleans(),
    }
)


@laws(200)
@given(models(), anything)
def test_every_way_out_lifts_its_refusal(model, fields):
    refusal = refusal_of(model, fields)
    assume(refusal)
    assert offers(refusal), f"no way out that a program can follow: {refusal}"
    for field, value in offers(refusal):
        assert fields[field] != value, f"what is refused is offered again: {refusal}"
        assert refusal_of(model, fields | {field: value}) != refusal


@laws(200)
@given(models(), anything)
def test_whoever_follows_the_ways_out_arrives_at_a_plan_that_runs(model, fields):
    """Not by every way: tp=2 or more may be no way out for a model of one head. By one of them at least."""
    assume(refusal_of(model, fields))
    tried, ahead = [], [fields]
    while ahead:
        fields = ahead.pop()
        tried.append(fields)
        refusal = refusal_of(model, fields)
        if not refusal:
            break
        found = (fields | {field: value} for field, value in offers(refusal))
        ahead += [fields for fields in found if fields not in tried]
    else:
        raise AssertionError(f"no way out arrives: {[refusal_of(model, fields) for fields in tried]}")
    rank_estimate(replace(model, tied_head=fields["tied_head"]), drawn_plan(fields), Rank(), H100)


def test_the_sequence_length_offered_fits_the_table_of_positions():
    model = Gpt(name="any", n_layers=1, d_model=6, n_heads=3, d_ff=6, vocab_size=6, max_seq_len=16)
    for seq_len, offered in ((16, 15), (4, 6)):
        plan = Plan(tp=3, sequence_parallel=True, seq_len=seq_len)
        with pytest.raises(PlanRefused, match=rf"use seq_len={offered}\.$"):
            check_plan(model, plan)
        check_plan(model, replace(plan, seq_len=offered))
    with pytest.raises(PlanRefused, match=r"use sequence_parallel=False\.$"):
        check_plan(replace(model, max_seq_len=2), replace(plan, seq_len=2))


def test_ways_out_are_read_from_the_refusals_text():
    refusal = "tp=3 does not divide n_heads=4; use one of 1, 2, 4, or pad vocab_size=5 to a multiple of tp."
    assert offers(refusal) == [("tp", 1), ("tp", 2), ("tp", 4)]
    refusal = "pp=2 puts them on stages; use pp=1, or the model with tied_head=False."
    assert offers(refusal) == [("pp", 1), ("tied_head", False)]


def test_what_powersgd_keeps_is_allocated_with_zeroed_gradients_too():
    e = estimate(
        "llama-3-8b", cluster="8xh100-sxm", dp=8, seq_len=64, optimizer="sgd-momentum", precision="bf16",
        recompute="full", ddp_comm_hook="powersgd", set_to_none=False,
    )  # fmt: skip
    assert e.peak.total_bytes <= e.allocated_bytes <= e.reserved_bytes
    assert not e.fits


def test_a_peak_that_grows_otherwise_with_many_micro_batches_is_not_extrapolated():
    """Of few micro-batches the update's instant is the worst, of many the last forward pass."""
    model = Llama(
        name="m",
        n_layers=4,
        d_model=256,
        n_heads=4,
        n_kv_heads=2,
        d_ff=512,
        vocab_size=1000,
        max_seq_len=2048,
    )
    e = estimate(
        model, pp=2, tp=2, seq_len=512, precision="fp32", recompute="full", schedule="gpipe", global_batch=30,
        torch_version="2.15",
    )  # fmt: skip
    for stage in e.stages:
        assert stage.peak_bytes <= stage.replayed.allocated_bytes <= stage.replayed.reserved_bytes


def test_figures_that_contradict_each_other_are_an_error_that_names_the_plan():
    stage = estimate("gpt2", seq_len=64, dp=2).worst
    rest = Counter(stage.record.rest)
    rest[buffer_of("a tensor that no step allocates", (2**40,), FP32)] += 1
    contradictory = replace(stage, record=replace(stage.record, rest=rest))
    with pytest.raises(ContradictoryEstimate, match=r"dp=2.*fault of memplan"):
        contradictory.replay()


@pytest.mark.parametrize("version", ["2.11", "2.12", "2.13", "2.15"])
@pytest.mark.parametrize("hook", ["none", "bf16", "powersgd"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    "plan", [{"dp": 2}, {"dp": 3, "zero": 1}, {"dp": 2, "gradient_as_bucket_view": True}]
)
def test_an_allocator_holds_at_least_the_tensors(version, hook, set_to_none, plan):
    e = estimate(
        "gpt2", seq_len=96, global_batch=12, ddp_comm_hook=hook, set_to_none=set_to_none,
        torch_version=version, **plan,
    )  # fmt: skip
    for stage in e.stages:
        replay = stage.replayed
        assert stage.peak_bytes <= replay.allocated_bytes <= replay.reserved_bytes
