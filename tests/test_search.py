"""Search: every plan, each with estimate's own figures, best first."""

import re
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, product
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memplan
from memplan import Cluster, Gpt, Llama, MemplanError, Plan
from memplan.checks import divisors
from memplan.comparison import why
from memplan.engines.checks import check_plan
from memplan.errors import InvalidValue, PlanRefused, UnknownName
from memplan.estimate import Estimate, estimate_plan
from memplan.hardware import VERDICTS, outside_allocator
from memplan.models import resolve
from memplan.passes.trace import traced
from memplan.plan import RECOMPUTES
from memplan.schedules import SCHEDULES
from memplan.search import judge, searched
from memplan.search.bounds import bounds
from memplan.search.plans import VARIED, number_of, value_of
from memplan.search.pool import Pool
from memplan.search.search import bases
from memplan.search.space import Space
from memplan.search.table import estimated_rows, search_rows
from memplan.tables import figures_of
from memplan.time.step import Measured, Roofline, StepTime
from memplan.units import GiB, MiB
from tests.grids import running

LLAMA = Llama(
    name="small", n_layers=4, d_model=64, n_heads=4, n_kv_heads=2, d_ff=160, vocab_size=320, max_seq_len=128
)
GPT = Gpt(name="small gpt", n_layers=3, d_model=64, n_heads=4, d_ff=128, vocab_size=256, max_seq_len=64)
# Like these, but of bytes that count beside CUDA's context and NCCL's buffers.
LARGER = replace(LLAMA, d_model=2048, d_head=128, n_heads=16, d_ff=5120, vocab_size=32000, max_seq_len=1024)
DEEP = replace(LARGER, n_layers=10)  # more stages on a rank than a schedule keeps gathered
LARGER_GPT = replace(GPT, d_model=2048, d_head=128, n_heads=16, n_kv_heads=16, d_ff=8192, vocab_size=32000)


def limited(text: str, usable_gib: float) -> Cluster:
    """A cluster of GPUs with less memory."""
    where = memplan.cluster(text)
    return replace(where, gpu=replace(where.gpu, usable_bytes=int(usable_gib * GiB)))


def room_bytes(estimated: Estimate) -> int:
    """What a plan may allocate and have the verdict "fits", if the allocator reserves no more."""
    plan = estimated.plan
    outside = outside_allocator(plan.mesh.n_communicators)
    return estimated.cluster.budget_bytes - outside.high_bytes


def plan_of(row: Any, base: Plan) -> Plan:
    values = {name: row[name] for name in VARIED}
    if values["recompute_blocks"] is not None and not values["recompute_blocks"] >= 1:
        values["recompute_blocks"] = None
    return replace(base, **values)


@settings(deadline=None, max_examples=12)
@given(
    model=st.sampled_from((LARGER, LARGER_GPT, replace(LARGER, tied_head=True))),
    n_gpus=st.sampled_from((1, 2, 3, 4)),
    global_batch=st.sampled_from((4, 6)),
    usable_gib=st.integers(3, 20),
    recompute=st.sampled_from((None, "none", "full")),
    precision=st.sampled_from(("bf16-mixed", "fp32")),
)
def test_every_plan_has_the_figures_of_its_estimate(
    model: Any, n_gpus: int, global_batch: int, usable_gib: int, recompute: Any, precision: str
):
    where = limited(f"{n_gpus}xh100-sxm", usable_gib)
    asked: dict[str, Any] = {"seq_len": 32, "precision": precision, "virtual_stages": [1, 2]}
    asked |= {"schedule": ("1f1b", "zbv")} | ({} if recompute is None else {"recompute": recompute})
    found = searched(model, cluster=where, global_batch=global_batch, keep=None, **asked)
    assert (len(found.within), len(found.beyond)) == (found.n_within, found.n_beyond)
    for within, judged in ((True, found.within), (False, found.beyond)):
        for one, estimated in zip(judged, map(found.estimate, judged), strict=True):
            assert (estimated.worst.peak_bytes <= room_bytes(estimated)) == within
            assert one.over_bytes == max(0, estimated.worst.peak_bytes - room_bytes(estimated))
            assert one.peak_bytes == estimated.worst.peak_bytes == estimated.peak.total_bytes
            assert one.step_s == (inf if estimated.step_s is None else estimated.step_s)
    for job, values in found.refused:
        with pytest.raises(MemplanError):
            check_plan(model, replace(job, **values))


def test_the_frame_says_why_not():
    asked: dict[str, Any] = {"global_batch": 8, "seq_len": 128, "keep": 40, "tp": [1, 3]}
    frame = memplan.search(LARGER, cluster=limited("4xh100-sxm", 3), **asked)
    assert [*dict.fromkeys(frame["verdict"])] == ["fits, tight", "cannot say", "does not fit", "refused"]
    said = dict(iter(frame.groupby("verdict")))
    assert said["cannot say"]["why"].str.contains("; 3.00 GiB are usable, less a margin of 5%").all()
    assert said["fits, tight"]["why"].isna().all()
    assert said["refused"]["why"].str.contains("use ").all()
    small = memplan.search(LARGER, cluster=limited("4xh100-sxm", 1), **asked)
    assert [*dict.fromkeys(small["verdict"])] == ["does not fit", "refused"]
    too_large = small[small["verdict"] == "does not fit"]
    assert (too_large["over_bytes"] == too_large["peak_bytes"] + 300 * MiB - GiB).all()
    assert too_large["device_low_bytes"].isna().all()
    assert too_large["why"].str.contains(r"iB are allocated on stage \d: .*; 1.00 GiB are usable").all()
    assert frame.attrs["n_refused"] == sum(frame.attrs["refused_by"].values())
    for name in ("peak_bytes", "device_low_bytes", "device_high_bytes", "over_bytes", "n_micro_batches"):
        assert frame[name].dtype == "Int64"


@settings(deadline=None, max_examples=6)
@given(
    model=st.sampled_from((LARGER, LARGER_GPT)),
    n_gpus=st.sampled_from((1, 2, 4)),
    usable_gib=st.integers(3, 14),
    margin=st.sampled_from((0.0, 0.05, 0.2)),
    objective=st.sampled_from(("speed", "memory", "micro_batch")),
)
def test_a_search_and_an_estimate_never_contradict_each_other(
    model: Any, n_gpus: int, usable_gib: int, margin: float, objective: Any
):
    """Every plan that is shown has the verdict, the interval and the time of its own estimate."""
    where = replace(limited(f"{n_gpus}xh100-sxm", usable_gib), margin=margin)
    asked: dict[str, Any] = {"global_batch": 8, "seq_len": 64}
    found = searched(model, cluster=where, keep=4, objective=objective, **asked)
    rows = [row for row in search_rows(found) if row["verdict"] != "refused"]
    assert rows
    for row in rows:
        own = memplan.estimate(model, cluster=where, **asked, **{name: row[name] for name in VARIED})
        assert own.verdict == row["verdict"]
        if row["verdict"] != "does not fit":
            assert own.device_bytes == (row["device_low_bytes"], row["device_high_bytes"])
        assert (own.peak.total_bytes, own.step_s) == (row["peak_bytes"], row["step_s"])
    places = [VERDICTS.index(row["verdict"]) for row in rows]
    assert places == sorted(places)


def test_figures_do_not_depend_on_what_a_process_has_forgotten():
    """Traces of stages are cached and evicted; the parts of a backward pass must go with the trace in use."""
    asked: dict[str, Any] = {"dp": 2, "pp": 2, "zero": 2, "schedule": "zero-bubble", "global_batch": 8}
    before = memplan.estimate(LARGER, seq_len=64, **asked).peak
    traced.cache_clear()
    assert memplan.estimate(LARGER, seq_len=64, **asked).peak == before


@pytest.mark.parametrize("seq_len, fastest", [(7168, "cannot say"), (6656, "fits, tight")])
def test_where_the_allocator_needs_more_the_search_leaves_it_room(seq_len: int, fastest: str):
    """The fastest by what it allocates may not fit, or tightly; one is found that does, and stands first."""
    asked: dict[str, Any] = {
        "cluster": "8xa100-80-sxm",
        "global_batch": 64,
        "seq_len": seq_len,
        "offload": False,
    }
    asked |= {"recompute": ("none", "selective")}
    found = searched("llama-3-8b", keep=1, zero=(2, 3), pp=1, tp=1, dp_replicate=1, **asked)
    assert [each.verdict for each in found.kept] == [fastest]
    assert found.fitting is not None
    assert found.fitting is not found
    verdicts = [row["verdict"] for row in search_rows(found)]
    assert verdicts[0] == "fits"
    assert set(verdicts) <= {"fits", "does not fit"}


def test_ties_are_broken_by_headroom_and_a_comparison_says_the_same():
    """Of plans within 1 % of the fastest, the one that holds least on a GPU stands first."""
    asked: dict[str, Any] = {"cluster": "8xh100-sxm", "global_batch": 64, "seq_len": 4096, "offload": False}
    found = searched("llama-3-8b", keep=8, pp=1, **asked)
    kept = [(each, row) for each, row in estimated_rows(found) if row["verdict"] == "fits"]
    groups = [[row["device_high_bytes"] for _, row in group] for _, group in groupby(kept, tie_of)]
    assert max(map(len, groups)) > 1
    assert all(group == sorted(group) for group in groups)
    assert found.best == kept[0][0]
    for (better, above), (worse, below) in pairwise(kept):
        if above["device_high_bytes"] != below["device_high_bytes"]:
            assert "\na is better: " in why(better, worse)
            assert "1.00 times" not in why(better, worse)


def tie_of(shown: tuple[Any, dict[str, Any]]) -> Any:
    return shown[1]["tie"]


def test_no_plan_is_left_out_or_there_twice():
    """Against every combination of values that check_plan takes, less those that make no difference."""
    n_gpus, batch = 4, 4
    base = Plan(global_batch=batch, seq_len=32)
    space = Space(model=LLAMA, n_gpus=n_gpus, base=base, ranges={"virtual_stages": (1, 2)})
    found = [tuple(values.values()) for values in running(space, most=50)]
    assert len(found) == len(set(found))
    expected = set()
    for pp, rep, dp, tp in product(divisors(n_gpus), repeat=4):
        if pp * rep * dp * tp != n_gpus or (rep > 1 and dp == 1):
            continue
        for zero, sp, offload, mb, recompute, schedule, v in product(
            range(4), (False, True), (False, True), divisors(batch), RECOMPUTES, SCHEDULES.own, (1, 2)
        ):
            if pp == 1 and (schedule, v) != ("1f1b", 1):
                continue
            if zero == 1 and rep * dp == 1:
                continue
            chosen = dp, rep, 1, tp, pp, v, 1, zero, sp, mb, recompute, None, schedule, offload
            values: dict[str, Any] = dict(zip(VARIED, chosen, strict=True))
            try:
                check_plan(LLAMA, replace(space.base, **values))
            except MemplanError:
                continue
            expected.add(tuple(values.values()))
    assert set(found) == expected


@pytest.mark.parametrize("objective", ["speed", "memory", "micro_batch"])
def test_the_best_come_first_and_of_equal_ones_the_simpler(objective: str):
    asked: dict[str, Any] = {"cluster": "4xh100-sxm", "global_batch": 8, "seq_len": 32}
    asked |= {"objective": objective, "schedule": ("1f1b", "interleaved-1f1b")}
    everything = searched(LLAMA, **asked, keep=None)
    keys = [one.keys(objective) for one in everything.within]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)
    best = searched(LLAMA, **asked, keep=7)
    assert best.n_plans == everything.n_plans
    assert plans_of(best.within) == plans_of(everything.within[:7])


def plans_of(judged: Any) -> list[Plan]:
    return [one.plan for one in judged]


@settings(deadline=None, max_examples=8)
@given(
    model=st.sampled_from((LARGER, LARGER_GPT)),
    n_gpus=st.sampled_from((1, 2, 4, 6)),
    usable_gib=st.integers(2, 12),
    keep=st.sampled_from((1, 3, 40)),
    objective=st.sampled_from(("speed", "memory", "micro_batch")),
    asked=st.sampled_from(({}, {"zero": (0, 1)}, {"offload": (False, True), "micro_batch": (2, 4)})),
    held=st.sampled_from((1, 5, 2**16)),
)
def test_what_is_found_is_what_estimating_every_plan_finds(
    model: Any, n_gpus: int, usable_gib: int, keep: int, objective: str, asked: dict[str, Any], held: int
):
    """However many plans are held by their bounds at a time."""
    where = limited(f"{n_gpus}xh100-sxm", usable_gib)
    asked = {"cluster": where, "seq_len": 32, "global_batch": 12, "recompute_blocks": (None, 1), **asked}
    asked |= {"objective": objective, "schedule": ("gpipe", "zero-bubble", "looped-bfs")}
    everything = searched(model, keep=None, **asked)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(judge, "HELD", held)
        found = searched(model, keep=keep, **asked)
    assert found.within == everything.within[:keep]
    assert (found.n_plans, found.n_refused) == (everything.n_plans, everything.n_refused)
    assert found.n_within <= everything.n_within
    assert found.n_beyond <= everything.n_beyond
    if not everything.n_within:
        assert found.beyond == everything.beyond[:keep]
    assert all(one.over_bytes > 0 for one in found.beyond)


@settings(deadline=None, max_examples=25)
@given(
    model=st.sampled_from((LLAMA, GPT, DEEP, replace(LLAMA, tied_head=True))),
    cluster=st.sampled_from(("4xh100-sxm", "6xa100-40-sxm", "6xcpu", "16xh100-sxm")),
    global_batch=st.sampled_from((8, 12, 48)),
    precision=st.sampled_from(("bf16-mixed", "fp32", "bf16")),
    optimizer=st.sampled_from(("adamw", "sgd", "sgd-momentum")),
    schedule=st.sampled_from(tuple(SCHEDULES.own)),
    options=st.sampled_from(
        (
            {},
            {"loss_chunks": 2},
            {"set_to_none": False},
            {"clip_grad_norm": 1.0},
            {"optimizer_impl": "foreach"},
            {"gradient_as_bucket_view": True},
            {"ddp_comm_hook": "powersgd"},
            {"fsdp_units": "model"},
            {"no_sync": True},
            {"fsdp_blocks": 2},
        )
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_plan_is_better_than_its_bounds(
    model: Any,
    cluster: str,
    global_batch: int,
    precision: Any,
    optimizer: str,
    schedule: str,
    options: dict[str, Any],
    seed: int,
):
    where = memplan.cluster(cluster)
    (base,) = bases(
        global_batch=global_batch, seq_len=32, precision=precision, optimizer=optimizer, **options
    )
    ranges = {"schedule": (schedule,), "recompute_blocks": (None, 1)}
    space = Space(model=model, n_gpus=where.n_gpus, base=base, ranges=ranges)
    random = np.random.default_rng(seed)
    for grid in [ruled.running for ruled in space.grids() if len(ruled.running)]:
        (place,) = random.integers(0, len(grid), 1)
        estimated = estimate_plan(model, grid.plan(place), where)
        for time_model in (Measured(), Measured(flash=2), Roofline(efficiency=0.5)):
            memory, seconds = bounds(model, grid, where, time_model)
            step_s = replace(estimated, time_model=time_model).step_s
            assert np.broadcast_to(seconds, grid.shape).flat[place] <= (inf if step_s is None else step_s)
        assert np.broadcast_to(memory, grid.shape).flat[place] <= estimated.worst.peak_bytes


@pytest.mark.parametrize(
    "cluster, asked",
    [
        ("8xh100-sxm", {"pp": 2, "tp": 2, "virtual_stages": 8, "micro_batch": 1, "seq_len": 512}),
        ("64xh100-sxm", {"pp": 4, "tp": 8, "virtual_stages": 1, "micro_batch": 8, "seq_len": 2048}),
    ],
)
def test_no_pipeline_under_fsdp2_holds_less_than_its_bound(cluster: str, asked: dict[str, int]):
    """Nor one with more stages on a rank than are gathered, nor one that waits for the embedding's output."""
    where, llama = memplan.cluster(cluster), resolve("llama-3-70b")
    (base,) = bases(global_batch=64, seq_len=asked["seq_len"])
    fields = {name: (value,) for name, value in asked.items() if name != "seq_len"} | {"dp": (2,)}
    schedule = "1f1b" if asked["virtual_stages"] == 1 else "interleaved-1f1b"
    space = Space(
        model=llama, n_gpus=where.n_gpus, base=base, ranges=fields | {"zero": (2, 3), "schedule": (schedule,)}
    )
    n_plans = 0
    for grid in [ruled.running for ruled in space.grids() if len(ruled.running)]:
        memory, _ = bounds(llama, grid, where, Measured())
        for place, least in enumerate(np.broadcast_to(memory, grid.shape).flat):
            assert least <= estimate_plan(llama, grid.plan(place), where).worst.peak_bytes
            n_plans += 1
    assert n_plans >= 24


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(1, 20))
def test_a_pool_holds_the_smallest_keys_and_says_where_it_was_cut(numbers: list[int], most: int):
    batch = len(numbers)
    space = Space(model=LLAMA, n_gpus=1, base=Plan(global_batch=1, seq_len=8), ranges={})
    grid = next(ruled.running for ruled in space.grids() if len(ruled.running))
    pool = Pool(most)
    for number in numbers:
        pool.add(grid, [np.array([[number]])], np.ones((1, 1), np.bool_))
    found = [int(entry.keys[0]) for entry in pool]
    assert pool.n_seen == batch
    assert found == sorted(found)
    assert found == sorted(number for number in numbers if number < pool.cut)
    assert len(found) >= min(most, batch)


def test_nothing_beats_the_front_and_it_beats_all_else():
    asked: dict[str, Any] = {"cluster": "4xh100-sxm", "global_batch": 8, "seq_len": 32}
    asked |= {"schedule": ("1f1b", "interleaved-1f1b"), "recompute": ("none", "full")}
    found = searched(LLAMA, **asked, objective="front").within
    everything = searched(LLAMA, **asked, keep=None).within
    on_front = [(one.step_s, one.peak_bytes) for one in found]
    assert len(on_front) > 1
    for one in everything:
        assert any(s <= one.step_s and p <= one.peak_bytes for s, p in on_front)
        assert not any(
            (one.step_s <= s and one.peak_bytes < p) or (one.step_s < s and one.peak_bytes <= p)
            for s, p in on_front
        )
    assert plans_of(searched(LLAMA, **asked, objective="front", keep=None).within) == plans_of(found)
    assert plans_of(searched(LLAMA, **asked, objective="front", keep=2).within) == plans_of(found[:2])


@pytest.mark.parametrize("keep", [20, None])
def test_a_front_shows_no_plan_that_another_one_shown_beats(keep: int | None):
    """Whatever their verdicts: here plans that fit, and one of which memplan cannot say."""
    asked: dict[str, Any] = {"cluster": "4xh100-sxm", "global_batch": 64, "seq_len": 8192, "pp": 1}
    asked |= {"zero": 3, "offload": False, "objective": "front", "keep": keep, "implementation": "reference"}
    found = searched("llama-3-8b", **asked)
    rows = [row for row in search_rows(found) if row["verdict"] != "refused"]
    assert {row["verdict"] for row in rows} >= {"fits", "cannot say"}
    assert found.beyond
    figures = sorted((row["step_s"], row["peak_bytes"]) for row in rows)
    held = [peak_bytes for _, peak_bytes in figures]
    assert held == sorted(held, reverse=True)
    assert len({*figures}) == len({*held}) == len(rows)


def test_a_field_that_a_search_varies_is_no_difference_of_its_jobs():
    found = searched(LLAMA, cluster="1xh100-sxm", global_batch=(4, 8), seq_len=32, objective="gpus")
    assert found.different == ("global_batch",)
    assert "4 or 8 x 32 tokens a step: " in str(found)


@pytest.mark.parametrize(
    "asked, kind",
    [
        ({"recompute_blocks": 1, "recompute": ("none", "full")}, "recompute_blocks although nothing is"),
        ({"virtual_stages": 2, "schedule": "interleaved-1f1b"}, "virtual stages without a pipeline"),
    ],
)
def test_a_search_refuses_what_an_estimate_refuses(asked: dict[str, Any], kind: str):
    job: dict[str, Any] = {"cluster": "2xh100-sxm", "global_batch": 8, "seq_len": 32, "tp": 1, "keep": None}
    rows = list(search_rows(searched(LLAMA, **job, **asked)))
    for row in rows:
        (name, value), *_ = asked.items()
        assert row[name] == value
        fields = {field: row[field] for field in VARIED}
        if row["verdict"] == "refused":
            with pytest.raises(PlanRefused, match=re.escape(row["why"])):
                memplan.estimate(LLAMA, cluster="2xh100-sxm", global_batch=8, seq_len=32, **fields)
    assert any(kind in refused for refused in searched(LLAMA, **job, **asked).refused_by)


def test_a_schedule_without_a_pipeline_makes_no_difference_and_both_say_so():
    asked: dict[str, Any] = {"cluster": "2xh100-sxm", "global_batch": 8, "seq_len": 32, "schedule": "gpipe"}
    said = "schedule='gpipe' makes no difference: with pp=1 there is no pipeline to order."
    assert memplan.estimate(LLAMA, **asked).notes == (said,)
    assert memplan.estimate(LLAMA, pp=2, **asked).notes == ()
    assert f"Note: {said}" in " ".join(str(searched(LLAMA, pp=1, **asked)).split())


def test_notes_are_of_the_plans_that_are_shown():
    """cuDNN was asked about micro-batches of 24 of this model, not of 3."""
    asked: dict[str, Any] = {
        "cluster": "1xh100-sxm",
        "global_batch": 24,
        "zero": 0,
        "precision": "bf16-mixed",
    }
    both = searched("resnet-50", micro_batch=(3, 24), **asked)
    text = " ".join(str(both).split())
    sizes = [row["micro_batch"] for row in search_rows(both) if row["verdict"] != "refused"]
    assert sorted(sizes) == [3, 24]
    found = {
        number: memplan.estimate("resnet-50", cluster="1xh100-sxm", global_batch=24, micro_batch=n).notes
        for number, n in enumerate(sizes, start=1)
    }
    assert found[1] != found[2]
    for number, notes in found.items():
        for note in notes:
            assert f"Note on plan {number}: {note}" in text
    assert "Note: " not in text
    alone = " ".join(str(searched("resnet-50", micro_batch=3, **asked)).split())
    assert all(f"Note: {note}" in alone for note in found[1 + sizes.index(3)])


def test_compared_and_advised_plans_have_their_notes():
    """cuDNN was asked about micro-batches of 24 and 256 of this model, not of 3."""
    asked: dict[str, Any] = {"cluster": "1xh100-sxm", "global_batch": 768}
    some, all_of_it = (memplan.estimate("resnet-50", micro_batch=n, **asked) for n in (3, 256))
    assert some.notes
    text = " ".join(memplan.why(some, all_of_it).split())
    assert all(f"Note on plan a: {note}" in text for note in some.notes)
    assert all(f"Note on plan b: {note}" in text for note in all_of_it.notes)
    assert all(f"Note: {note}" in " ".join(str(memplan.advise(some)).split()) for note in some.notes)


def test_the_longest_sequence_of_what_has_none_is_no_question():
    with pytest.raises(InvalidValue, match=r"resnet-50 have no sequence .*; use objective='micro_batch'"):
        searched("resnet-50", cluster="1xh100-sxm", global_batch=8, objective="seq_len")


def test_what_has_no_tokens_is_counted_in_samples():
    found = str(searched("resnet-50", cluster="1xh100-sxm", global_batch=(8, 16), zero=0, tp=1))
    assert "8 or 16 samples a step" in found
    assert "samples/s/GPU" in found
    assert "tok" not in found


WIDE: dict[str, Any] = {
    "dp_replicate": (1, 2),
    "fsdp_units": ("block", "block+ends"),
    "optimizer_impl": ("foreach", "for-loop"),
    "sequence_parallel": True,
    "recompute": "full",
    "recompute_blocks": 1,
}


@pytest.mark.parametrize(
    "asked",
    [
        {"schedule": "interleaved-1f1b", "virtual_stages": 4, "recompute": ("selective", "full")},
        {"schedule": "interleaved-1f1b", "virtual_stages": 4, "zero": (2, 3), "tp": 2, **WIDE},
    ],
)
def test_what_a_search_prints_fits_80_columns(asked: dict[str, Any]):
    model = replace(LARGER, n_layers=32)
    job: dict[str, Any] = {"pp": 4, "global_batch": (1024, 2048), "seq_len": (512, 1024), "keep": 4}
    text = str(searched(model, cluster="128xh100-sxm", **job | asked))
    assert re.search(r"\n#? +#? *pp ", text)
    assert max(map(len, text.splitlines())) <= 80


def test_several_batches_and_lengths_are_compared_by_the_token():
    job: dict[str, Any] = {"cluster": "4xh100-sxm", "keep": 20, "schedule": "1f1b", "offload": False}
    together = searched(LLAMA, global_batch=(8, 12), seq_len=(32, 64), **job)
    alone = [searched(LLAMA, global_batch=n, seq_len=m, **job) for m in (32, 64) for n in (8, 12)]
    jobs = [(job.global_batch, job.seq_len) for job in together.jobs]
    assert jobs == [(8, 32), (12, 32), (8, 64), (12, 64)]
    for count in ("n_plans", "n_within", "n_beyond", "n_slower", "n_refused"):
        assert getattr(together, count) == sum(getattr(each, count) for each in alone)
    by_token = sorted(
        one.step_s / one.plan.global_batch / one.plan.seq_len for a in alone for one in a.within
    )
    found = [one.step_s / one.plan.global_batch / one.plan.seq_len for one in together.within]
    assert found == pytest.approx(by_token[:20], rel=1e-12)
    rows = list(search_rows(together))
    assert len({(row["global_batch"], row["seq_len"]) for row in rows}) > 1
    for row in rows:
        if row["verdict"] != "refused":
            fields = {name: row[name] for name in (*VARIED, "global_batch", "seq_len")}
            assert memplan.estimate(LLAMA, cluster="4xh100-sxm", **fields).step_s == row["step_s"]
    assert "8 or 12 x 32 or 64 tokens a step" in str(together)


def test_several_values_of_any_field_and_of_an_engines_option_are_searched():
    asked: dict[str, Any] = {
        "cluster": "4xh100-sxm",
        "global_batch": 8,
        "seq_len": 32,
        "keep": 200,
        "zero": 3,
    }
    precisions, units = ("bf16", "bf16-mixed"), ("block", "model")
    together = searched(LLAMA, precision=precisions, fsdp_units=list(units), **asked)
    alone = [searched(LLAMA, precision=p, fsdp_units=u, **asked) for p in precisions for u in units]
    assert together.n_plans == sum(each.n_plans for each in alone)
    assert together.different == ("precision", "fsdp_units")
    times = sorted(one.step_s for each in alone for one in each.within)
    assert [one.step_s for one in together.within] == pytest.approx(times[:200], rel=1e-12)
    rows = [row for row in search_rows(together) if row["verdict"] != "refused"]
    assert {(row["precision"], row["fsdp_units"]) for row in rows} == {*product(precisions, units)}
    for row in rows:
        fields = {name: row[name] for name in (*VARIED, "global_batch", "seq_len", "precision", "fsdp_units")}
        assert memplan.estimate(LLAMA, cluster="4xh100-sxm", **fields).step_s == row["step_s"]
    assert "precision=bf16 or bf16-mixed, fsdp_units=block or model" in str(together).replace("\n", " ")
    with pytest.raises(UnknownName, match="fsdp_units 'modle'; did you mean 'model'"):
        searched(LLAMA, fsdp_units=["block", "modle"], **asked)


def test_a_tensor_axis_is_on_one_node_unless_that_is_lifted():
    model = replace(LARGER, n_kv_heads=16)
    job: dict[str, Any] = {"cluster": "16xh100-sxm", "global_batch": 16, "seq_len": 64, "schedule": "1f1b"}
    job |= {"objective": "memory", "recompute": "none", "offload": False, "micro_batch": 1}
    tps = {one.plan.tp for one in searched(model, keep=None, **job).within}
    assert max(tps) == 8
    lifted = searched(model, keep=None, tp_across_nodes=True, **job)
    assert max(one.plan.tp for one in lifted.within) == 16
    with pytest.raises(PlanRefused, match=r"tp=16 is on several nodes of 8 GPUs.*--tp-across-nodes"):
        searched(model, tp=16, **job)
    assert searched(model, tp=16, tp_across_nodes=True, **job).n_within
    assert "tp=16 is left out" in str(searched(model, tp=(8, 16), **job))
    with pytest.raises(PlanRefused, match="no mesh of 16 GPUs has tp=32; use degrees of 1, 2, 4, 8, 16"):
        searched(model, tp=32, **job)


@dataclass(frozen=True)
class Twice:
    """A time model that is no roofline: every part of the roofline's times, twice."""

    label: str = "twice"
    band: None = None

    def missing(self, plan: Any, cluster: Any) -> tuple[str, ...]:
        return Roofline(efficiency=0.5).missing(plan, cluster)

    def step_times(self, ranks: Any, plan: Any, cluster: Any) -> Any:
        times = Roofline(efficiency=0.5).step_times(ranks, plan, cluster)
        return tuple(StepTime(**{part: 2 * s for part, s in time.parts.items()}) for time in times)


@pytest.mark.parametrize("model", [Measured(flash=2), Roofline(efficiency=0.7), Twice()])
def test_plans_are_ranked_by_the_time_model_that_is_given(model: Any):
    job: dict[str, Any] = {"cluster": "4xh100-sxm", "global_batch": 8, "seq_len": 32, "schedule": "1f1b"}
    found = searched(LLAMA, keep=5, time_model=model, **job)
    everything = searched(LLAMA, keep=None, time_model=model, **job)
    assert found.within == everything.within[:5]
    estimated = memplan.estimate(LLAMA, cluster="4xh100-sxm", **fields_of(found.within[0].plan))
    assert found.within[0].step_s == replace(estimated, time_model=model).step_s
    assert found.best.time_model is model


def fields_of(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in (*VARIED, "global_batch", "seq_len")}


@pytest.mark.parametrize("objective", ["speed", "memory", "front"])
@pytest.mark.parametrize("keep", [1, 3])
def test_no_more_plans_are_shown_than_are_to_be_kept(objective: Any, keep: int):
    asked: dict[str, Any] = {"cluster": "8xh100-sxm", "global_batch": 64, "seq_len": 8192, "tp": (1, 2)}
    found = searched("llama-3-8b", objective=objective, keep=keep, pp=1, offload=False, **asked)
    verdicts = [row["verdict"] for row in search_rows(found)]
    assert 1 <= sum(verdict in ("fits", "cannot say") for verdict in verdicts) <= keep
    assert verdicts[0] == "fits"
    shown = [line for line in str(found).splitlines() if re.match(r" ?\d+=? +1 ", line)]
    assert len(shown) <= keep


def test_modules_of_the_package_are_not_hidden_by_its_function():
    import memplan.search.search as module

    assert module.searched is searched
    assert callable(memplan.search)


def test_progress_counts_every_plan():
    seen: list[int] = []
    job: dict[str, Any] = {"cluster": "4xh100-sxm", "global_batch": 8, "seq_len": 32}
    found = memplan.search(LLAMA, **job, keep=3, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == found.attrs["n_plans"]


def test_the_smallest_cluster_is_the_smallest():
    found = memplan.smallest_cluster("llama-2-7b", "a100-80-sxm", global_batch=16, seq_len=512, tp=1, pp=1)
    n = found.cluster.n_gpus
    assert n > 1
    for m in range(1, n):
        fewer = searched(
            "llama-2-7b", cluster=f"{m}xa100-80-sxm", global_batch=16, seq_len=512, tp=1, pp=1, micro_batch=1
        )
        assert fewer.fitting is None


def test_the_longest_sequence_is_the_longest():
    asked: dict[str, Any] = {
        "cluster": "4xa100-40-sxm",
        "global_batch": 4,
        "micro_batch": 1,
        "offload": False,
        "tp": 1,
        "pp": 1,
    }
    found = memplan.longest_sequence("llama-2-7b", **asked)
    n = found.jobs[0].seq_len
    assert n % 256 == 0
    assert found.fitting is not None
    assert searched("llama-2-7b", seq_len=n + 256, **asked).fitting is None


def test_the_fewest_gpus_and_the_longest_sequence_are_objectives_too():
    small = limited("4xh100-sxm", 6)
    few = memplan.search(
        LARGER, cluster=small, global_batch=8, objective="gpus", seq_len=64, keep=5, offload=False
    )
    assert few.attrs["cluster"] == "2xh100-sxm"
    assert few["verdict"].iloc[0] == "fits"
    one = replace(small, n_gpus=1, gpus_per_node=1)
    alone = searched(LARGER, cluster=one, global_batch=8, seq_len=64, micro_batch=1, offload=False)
    assert alone.fitting is None
    asked: dict[str, Any] = {"cluster": limited("4xh100-sxm", 16), "global_batch": 8}
    found = memplan.search(LARGER, objective="seq_len", tp=1, pp=1, offload=False, keep=5, **asked)
    longest = memplan.longest_sequence(LARGER, tp=1, pp=1, offload=False, keep=5, **asked)
    assert found.attrs["seq_len"] == longest.jobs[0].seq_len
    assert found["peak_bytes"].iloc[0] == longest.to_frame()["peak_bytes"].iloc[0]
    with pytest.raises(PlanRefused, match=r"small fits on 4xh100-sxm \(nearest: .*; use more GPUs"):
        memplan.search(LARGER, cluster=limited("4xh100-sxm", 1), global_batch=8, seq_len=64, objective="gpus")


def test_the_largest_model_is_in_the_code_that_was_asked_for():
    job: dict[str, Any] = {"cluster": "8xh100-sxm", "global_batch": 8, "seq_len": 512, "keep": 1}
    found = memplan.largest_model([LLAMA], implementation="torchtitan", zero=3, tp=1, pp=1, **job)
    assert found.model.implementation == "torchtitan"


def test_the_largest_model_is_the_largest():
    names = ["gpt2", "llama-2-7b", "llama-3-70b"]
    job: dict[str, Any] = {"cluster": "2xa100-80-sxm", "global_batch": 4, "seq_len": 512, "offload": False}
    found = memplan.largest_model(names, **job)
    assert found.model.name == "llama-2-7b"


def test_advice_frees_what_it_says_and_ends_in_a_plan_that_fits():
    asked = memplan.estimate(
        "llama-3-8b", cluster="8xa100-40-sxm", zero=0, micro_batch=4, global_batch=64, seq_len=4096
    )
    advice = memplan.advise(asked)
    assert asked.fits is False
    assert advice.best is not None
    assert advice.best.verdict == "fits"
    for change, row in zip(advice.changes, advice.rows(), strict=True):
        if change.estimated is not None:
            assert row["verdict"] == change.estimated.verdict
            assert figures_of(change.estimated).items() <= row.items()
            assert row["freed_bytes"] == asked.peak.total_bytes - change.estimated.peak.total_bytes
            after_s, before_s = change.estimated.step_s, asked.step_s
            assert row["slower_s"] == (None if after_s is None or before_s is None else after_s - before_s)
    useful = [r["slower_s"] for r in advice.rows() if (r["freed_bytes"] or 0) > 0]
    assert useful == sorted(useful, key=lambda s: inf if s is None else s)
    assert len(advice.to_frame()) == len(advice.changes)
    with pytest.raises(PlanRefused, match="limit to fit"):
        memplan.advise(memplan.estimate("gpt2"))


def test_why_says_what_makes_the_difference():
    job: dict[str, Any] = {"cluster": "64xh100-sxm", "global_batch": 512, "seq_len": 8192}
    job |= {"model": "llama-3-70b"}
    fits = memplan.estimate(**job, pp=4, tp=8, zero=1, sequence_parallel=True, recompute="full")
    not_fit = memplan.estimate(**job, zero=0)
    assert "a is better: it fits" in memplan.why(fits, not_fit)
    assert "b is better: it fits" in memplan.why(not_fit, fits)
    slower = memplan.estimate(**job, zero=3, recompute="full")
    faster = memplan.estimate(**job, zero=3, recompute="selective")
    text = memplan.why(slower, faster)
    assert "recompute" in text
    assert max(map(len, text.splitlines())) <= 100
    with pytest.raises(InvalidValue, match="these are different jobs"):
        memplan.why(fits, memplan.estimate(**job | {"global_batch": 256}, zero=3))


@pytest.mark.parametrize(
    "asked, error, text",
    [
        ({"tp": []}, InvalidValue, "leaves nothing to try"),
        ({"tp": "two"}, InvalidValue, "tp='two'"),
        ({"recompute": ["none", "ful"]}, UnknownName, "did you mean 'full'"),
        ({"offload": "yes"}, InvalidValue, "offload='yes'"),
        ({"zero": 4}, InvalidValue, "from 0 to 3"),
        ({"objective": "fast"}, UnknownName, "objective"),
        ({"objective": "seq_len"}, InvalidValue, "seq_len=32 is what is asked for; leave it out"),
        ({"keep": 0}, InvalidValue, "keep=0"),
        ({"workers": 2}, UnknownName, "option of a plan 'workers'"),
        ({"colour": 1}, UnknownName, "option of a plan"),
        ({"global_batch": 0}, InvalidValue, "global_batch=0"),
        ({"cluster": None}, InvalidValue, "nothing to search"),
        ({"cluster": "4xcpu"}, InvalidValue, "objective='memory'"),
    ],
)
def test_bad_questions_are_told_what_to_ask(asked: dict[str, Any], error: type[MemplanError], text: str):
    job: dict[str, Any] = {"cluster": "4xh100-sxm", "global_batch": 8, "seq_len": 32} | asked
    with pytest.raises(error, match=text):
        memplan.search(LLAMA, **job)


def test_options_of_ddp_and_fsdp_narrow_the_search():
    job: dict[str, Any] = {"cluster": "4xh100-sxm", "global_batch": 8, "seq_len": 32}
    model_unit = searched(LLAMA, **job, fsdp_units="model")
    assert model_unit.n_within
    assert {one.plan.zero for one in model_unit.within} <= {2, 3}
    hooked = searched(LLAMA, **job, ddp_comm_hook="bf16")
    assert hooked.n_within
    assert {one.plan.zero for one in hooked.within} <= {0, 1}


@pytest.mark.parametrize("name", VARIED)
def test_columns_hold_every_value(name: str):
    values = {"schedule": tuple(SCHEDULES.own), "recompute": RECOMPUTES, "recompute_blocks": (None, 1, 5)}
    for value in values.get(name, (False, True) if name in ("offload", "sequence_parallel") else (1, 2)):
        assert value_of(name, number_of(name, value)) == value


def test_recomputed_blocks_are_counted_against_the_largest_stage_that_was_asked_for():
    found = memplan.search(
        "llama-2-7b", cluster="2xh100-sxm", pp=2, tp=1, layers_per_stage=(8, 24), recompute="full",
        recompute_blocks=[16, 20, 24, None], schedule="1f1b", zero=0, micro_batch=1, global_batch=4,
        seq_len=512, keep=None,
    )  # fmt: skip
    assert sorted(found.recompute_blocks.dropna()) == [16, 20, 24]


def test_stages_of_a_rank_follow_from_the_layers_of_each_stage():
    model = Llama(name="l", n_layers=12, d_model=512, n_heads=8, d_ff=1024, vocab_size=1000, max_seq_len=512)
    found = memplan.search(
        model, cluster="2xh100-sxm", pp=2, tp=1, layers_per_stage=(1, 2) * 4, schedule="interleaved-1f1b",
        recompute="none", zero=0, micro_batch=1, global_batch=8, seq_len=512,
    )  # fmt: skip
    assert list(found.virtual_stages) == [4]
    assert set(found.verdict) == {"fits"}


def test_the_largest_preset_in_some_code_is_one_that_has_it():
    found = memplan.largest_model(implementation="huggingface", cluster="1xh100-sxm", global_batch=1)
    assert found.model.implementation == "huggingface"
    with pytest.raises(InvalidValue, match="planned as its own code"):
        memplan.estimate("resnet-50", implementation="huggingface")


def test_a_length_that_is_left_out_is_the_context_and_at_most_8192_tokens():
    short, long = memplan.estimate("gpt2"), memplan.estimate("llama-3.1-8b", cluster="8xh100-sxm", zero=3)
    assert (short.plan.seq_len, long.plan.seq_len) == (1024, 8192)
    said = "The length was left out: sequences of 8,192 tokens, of the 131,072 of the model's context"
    assert not any("left out" in note for note in short.notes)
    assert any(note.startswith(said) for note in long.notes)
    given = memplan.estimate("llama-3.1-8b", cluster="8xh100-sxm", zero=3, seq_len=8192)
    assert not any("left out" in note for note in given.notes)
    found = searched("llama-3.1-8b", cluster="8xh100-sxm", zero=3, global_batch=8)
    assert any(sentence.startswith(said) for sentence in found.left_out)
    assert {job.seq_len for job in found.jobs} == {8192}


def test_a_search_over_engines_ranks_the_plans_of_all():
    """Each engine's own search, with the plans of both in one order."""
    asked: dict[str, Any] = {"cluster": "2xa100-40-sxm", "global_batch": 4, "seq_len": 64, "keep": 4}
    asked |= {"implementation": "huggingface", "zero": (0, 3), "recompute": "none"}
    alone = [searched("llama-3.2-1b", engine=engine, **asked) for engine in ("torch", "deepspeed")]
    found = searched("llama-3.2-1b", engine=("torch", "deepspeed"), **asked)
    assert found.n_plans == sum(one.n_plans for one in alone)
    best = sorted([judged for one in alone for judged in one.within], key=found.keys)[:4]
    assert plans_of(found.within) == plans_of(best)
    assert {plan.engine for plan in plans_of(found.within)} == {"torch", "deepspeed"}
    assert found.different == ("engine",)


def test_a_search_over_engines_takes_options_that_all_have_and_one_size_at_a_time():
    asked: dict[str, Any] = {"cluster": "2xa100-40-sxm", "engine": ("torch", "deepspeed")}
    with pytest.raises(InvalidValue, match="overlap_comm=True is an option of engine='deepspeed', not of"):
        searched("llama-3.2-1b", overlap_comm=True, **asked)
    with pytest.raises(InvalidValue, match="one engine at a time; use engine='torch'"):
        searched("llama-3.2-1b", objective="gpus", **asked)
