"""Laws that hold for any model and plan, whatever the numbers.

Small models of both families under every kind of plan, on both devices. The laws are about bytes, so none of
them has a tolerance.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from memplan import Gpt, Llama, Model, Plan, parameter_count
from memplan.engines.torch import Rank, Stage
from memplan.engines.torch.sharding import padded_shard_elements
from memplan.errors import PlanRefused
from memplan.estimate import StageEstimate, rank_estimate
from memplan.plan import OPTIMIZERS, PRECISIONS, RECOMPUTES, SCHEDULES, check_plan
from memplan.shapes import KINDS, Buffer, Event
from memplan.tables import ledger_rows
from memplan.tape import CPU_RANDOM_STATE_BYTES, Device
from memplan.timeline import Stretch, events, running_bytes


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

    model: Model
    plan: Plan
    stage: int
    device: Device

    def on(self, dp_rank: int = 0, tp_rank: int = 0, **changes: Any) -> StageEstimate:
        """The estimate of one rank of the stage, with changes to the plan."""
        rank = Rank(pp=self.stage, dp=dp_rank, tp=tp_rank)
        return rank_estimate(self.model, replace(self.plan, **changes), rank, self.device)

    def of(self, **changes: Any) -> Stage:
        """The engine's stage itself, on its first rank."""
        return Stage(self.model, replace(self.plan, **changes), Rank(pp=self.stage), self.device)

    def held_bytes(self, **changes: Any) -> int:
        """Weights, gradients and optimizer state of the data-parallel rank that holds most of them."""
        n = changes.get("dp", self.plan.dp)
        return max(self.on(dp_rank, **changes).states.total_bytes for dp_rank in range(n))


@st.composite
def models(draw: st.DrawFn) -> Model:
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
    chosen = {
        "zero": field("zero", st.integers(0, 3) if dp > 1 else st.just(0)),
        "sequence_parallel": draw(st.booleans()) if tp > 1 else False,
        "seq_len": draw(st.sampled_from([4, 8, 16])),
        "precision": field("precision", st.sampled_from(PRECISIONS)),
        "optimizer": field("optimizer", st.sampled_from(OPTIMIZERS)),
        "recompute": field("recompute", st.sampled_from(RECOMPUTES)),
        "schedule": field("schedule", st.sampled_from(SCHEDULES)),
    }
    least = pp if chosen["schedule"] == "1f1b" else 1
    n_micro_batches = draw(st.integers(least, least + 5))
    plan = Plan(
        dp=dp,
        tp=tp,
        pp=pp,
        micro_batch=micro_batch,
        global_batch=dp * micro_batch * n_micro_batches,
        **chosen,
    )
    assume(runs(model, plan))
    return Case(model, plan, draw(st.integers(0, pp - 1)), field("device", st.sampled_from(["cpu", "cuda"])))


def runs(model: Model, plan: Plan) -> bool:
    try:
        check_plan(model, plan)
    except PlanRefused:
        return False
    return True


def one_by_one(stretch: Stretch) -> Iterator[Event]:
    """Every event of a step, unrolled."""
    for _ in range(stretch.repeats):
        yield from stretch.events
        for part in stretch.parts:
            yield from one_by_one(part)


def some_rank(case: Case) -> StageEstimate:
    """The last rank of the stage: its shards are the uneven ones."""
    return case.on(case.plan.dp - 1, case.plan.tp - 1)


# The peak


@laws(150)
@given(cases())
def test_what_is_alive_at_the_peak_adds_up_to_it(case):
    rank = some_rank(case)
    parts = rank.peak
    assert sum(getattr(parts, f"{kind}_bytes") for kind in KINDS) == rank.peak_bytes
    assert sum(row["total_bytes"] for row in ledger_rows(rank.alive)) == rank.peak_bytes
    assert all(n > 0 for n in rank.alive.values())


@laws(150)
@given(cases())
def test_the_closed_form_is_the_unrolled_steps_maximum(case):
    rank = some_rank(case)
    held = [
        rank.rest_bytes,
        *(held_bytes for _, held_bytes in running_bytes(rank.timeline.step, rank.rest_bytes)),
    ]
    assert rank.peak_bytes == max(held)
    assert min(held) == rank.rest_bytes


@laws(150)
@given(cases())
def test_the_peak_is_the_highest_instant(case):
    rank = some_rank(case)
    assert max(instant.total_bytes for instant in rank.instants) == rank.peak_bytes


# The step


@laws(150)
@given(cases())
def test_nothing_is_freed_before_it_is_allocated(case):
    alive: Counter[Buffer] = Counter()
    for event in one_by_one(some_rank(case).timeline.step):
        alive[event.buffer] += event.sign
        assert alive[event.buffer] >= 0, f"{event.buffer} is freed once more than it was allocated"


@laws(150)
@given(cases())
def test_a_step_leaves_its_gradients_and_nothing_else(case):
    """zero_grad frees them after the step. FSDP2's are views of whole reduced shards, padding and all."""
    plan, rank = case.plan, some_rank(case)
    left: Counter[Buffer] = Counter()
    for event in one_by_one(rank.timeline.step):
        left[event.buffer] += event.sign
    assert {buffer.kind for buffer, n in left.items() if n} == {"grads"}
    if plan.zero < 2:
        grads_bytes = rank.states.grads_bytes
    else:
        stage = case.of()
        counted = stage.counted_parameters()
        grads_bytes = stage.weight_dtype.itemsize * sum(
            n * padded_shard_elements(parameter, plan.dp) for parameter, n in counted
        )
        assert grads_bytes >= rank.states.grads_bytes
    assert sum(n * buffer.n_bytes for buffer, n in left.items()) == grads_bytes


@laws(80)
@given(cases())
def test_more_micro_batches_never_lower_the_peak(case):
    plan = case.plan
    one_more = plan.global_batch + plan.dp * plan.micro_batch
    assert case.on(global_batch=one_more).peak_bytes >= case.on().peak_bytes


@laws(80)
@given(cases())
def test_larger_micro_batches_never_lower_the_peak(case):
    plan = case.plan
    larger = {
        "micro_batch": plan.micro_batch + 1,
        "global_batch": plan.global_batch // plan.micro_batch * (plan.micro_batch + 1),
    }
    assert case.on(**larger).peak_bytes >= case.on().peak_bytes


@laws(80)
@given(cases(pp=st.integers(2, 4), schedule=st.just("1f1b")))
def test_1f1b_needs_no_more_for_more_micro_batches_but_the_batch_itself(case):
    plan = case.plan
    per_micro_batch = plan.dp * plan.micro_batch
    first, second = ((2 * plan.pp + 3 + more) * per_micro_batch for more in (0, 3))
    of_step = [
        rank.peak_bytes - rank.rest_bytes for n in (first, second) for rank in [case.on(global_batch=n)]
    ]
    assert of_step[0] == of_step[1]


@laws(80)
@given(
    cases(pp=st.integers(2, 4), zero=st.just(0), schedule=st.just("1f1b"), device=st.just("cuda")),
)
def test_1f1b_never_needs_more_than_gpipe(case):
    assert case.on().peak_bytes <= case.on(schedule="gpipe").peak_bytes


@laws(80)
@given(cases(recompute=st.just("none")))
def test_recomputation_keeps_a_blocks_output_and_nothing_else(case):
    """On CPU the generator's state too."""

    def kept_bytes(recompute: str) -> int:
        trace = case.of(recompute=recompute).trace
        return events("block", (*trace.block.events, *trace.block_casts.events)).net_bytes

    random_state_bytes = CPU_RANDOM_STATE_BYTES if case.device == "cpu" else 0
    assert kept_bytes("full") - random_state_bytes == case.of().trace.boundary.n_bytes
    assert kept_bytes("full") - random_state_bytes < kept_bytes("none")


# Sharding


@laws(80)
@given(cases(dp=st.integers(2, 4), zero=st.just(0)))
def test_more_sharding_never_holds_more_states(case):
    held = [
        case.held_bytes(zero=zero) for zero in range(4) if runs(case.model, replace(case.plan, zero=zero))
    ]
    assert held == sorted(held, reverse=True)


@laws(80)
@given(cases())
def test_twice_the_data_ranks_never_hold_more_states(case):
    twice = {"dp": 2 * case.plan.dp, "global_batch": 2 * case.plan.global_batch}
    assume(runs(case.model, replace(case.plan, **twice)))
    assert case.held_bytes(**twice) <= case.held_bytes()


@laws(80)
@given(cases(dp=st.integers(2, 4), zero=st.sampled_from([2, 3])))
def test_fsdp_shards_cover_the_whole(case):
    shards = [case.on(dp).states for dp in range(case.plan.dp)]
    stage = case.of()
    whole_bytes = stage.weight_dtype.itemsize * sum(n * p.n_elements for p, n in stage.counted_parameters())
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
        stage.counted_parameters() for stage in (case.of(), case.of(tp=1, sequence_parallel=False))
    )
    for (part, n_part), (parameter, n) in zip(divided, whole, strict=True):
        times = 1 if part.tp_dim is None else case.plan.tp
        assert (part.name, n_part) == (parameter.name, n)
        assert part.n_elements * times == parameter.n_elements


@laws(80)
@given(cases(tp=st.just(1), zero=st.sampled_from([0, 1]), dp=st.integers(2, 3)))
def test_pipeline_stages_cover_the_model(case):
    itemsize = 2 if case.plan.precision == "bf16" else 4
    stages = [case._replace(stage=stage).on() for stage in range(case.plan.pp)]
    assert sum(s.states.weights_bytes for s in stages) == itemsize * parameter_count(case.model)
    layers = [layer for stage in stages for layer in stage.layers]
    assert layers == list(range(case.model.n_layers))


@laws(200)
@given(cases(dp=st.integers(2, 4), zero=st.just(1), pp=st.just(1)))
def test_the_rank_that_stands_for_a_stage_holds_most_states(case):
    stage = case.of()
    fullest = stage.on_fullest_rank().rank
    assert case.on(fullest.dp).states.total_bytes == case.held_bytes()


# Traffic


@laws(80)
@given(cases())
def test_no_rank_sends_more_than_twice_what_it_passes(case):
    for collective in some_rank(case).collectives:
        assert collective.calls > 0
        assert 0 <= collective.wire_bytes <= 2 * collective.payload_bytes
        assert getattr(case.plan, collective.axis) > 1


@laws(40)
@given(cases())
def test_every_rank_of_a_stage_issues_the_same_collectives(case):
    plan = case.plan
    issued = {case.on(dp, tp).collectives for dp in range(plan.dp) for tp in range(plan.tp)}
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
@given(cases(dp=st.integers(2, 4), zero=st.sampled_from([0, 1])))
def test_ddp_reduces_every_gradient_once(case):
    rank = case.on()
    reduced = [c.payload_bytes for c in rank.collectives if c.what == "all-reduce gradients"]
    assert reduced == [rank.states.grads_bytes]


# Ways out

WAYS_OUT = {
    r"^global_batch=\d+ is not a multiple .*; use (\d+)\.$": "global_batch",
    r"use global_batch=(\d+) or more\.$": "global_batch",
    r"^tp=\d+ does not divide .* use one of ([\d, ]+\d)": "tp",
    r"[ ,]tp=(\d+)(?:[,.]| or)": "tp",
    r"use seq_len=(\d+)\.$": "seq_len",
    r"^seq_len=\d+ is longer .* use (\d+) or less\.$": "seq_len",
    r"^pp=\d+ is more .* use at most (\d+)\.$": "pp",
    r"use pp=(\d+),": "pp",
    r"use dp of (\d+) or more,": "dp",
    r"use tp of (\d+) or more,": "tp",
    r"use zero=(\d+) or": "zero",
    r"zero=\d+ or (\d+), tp": "zero",
    r"or zero=(\d+)\.$": "zero",
    r"sequence_parallel=(False)\.$": "sequence_parallel",
    r"model with tied_head=(False)\.$": "tied_head",
}
"""What a refusal offers, as its text says it, and the field that takes it."""


def offers(refusal: str) -> list[tuple[str, int | bool]]:
    """Every field and value that a refusal's way out names."""
    way_out = refusal[refusal.rindex("; use ") :]
    found: list[tuple[str, int | bool]] = []
    for pattern, field in WAYS_OUT.items():
        for match in re.finditer(pattern, refusal):
            if match.end() > len(refusal) - len(way_out):
                values = match.group(1).split(", ")
                found += [(field, value != "False" and int(value)) for value in values]
    return found


def refusal_of(model: Model, fields: dict[str, Any]) -> str:
    """Why a plan cannot run; empty if it can."""
    try:
        check_plan(replace(model, tied_head=fields["tied_head"]), plan_of(fields))
    except PlanRefused as refused:
        return str(refused)
    return ""


def plan_of(fields: dict[str, Any]) -> Plan:
    return Plan(**{name: value for name, value in fields.items() if name != "tied_head"})


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
        "schedule": st.sampled_from(SCHEDULES),
        "tied_head": st.booleans(),
    }
)


@laws(150)
@given(models(), anything)
def test_every_way_out_lifts_its_refusal(model, fields):
    refusal = refusal_of(model, fields)
    assume(refusal)
    assert offers(refusal), f"no way out that a program can follow: {refusal}"
    for field, value in offers(refusal):
        assert fields[field] != value, f"what is refused is offered again: {refusal}"
        assert refusal_of(model, fields | {field: value}) != refusal


@laws(150)
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
    rank_estimate(replace(model, tied_head=fields["tied_head"]), plan_of(fields), Rank(), "cuda")


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
