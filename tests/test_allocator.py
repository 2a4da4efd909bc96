"""The caching allocator by hand, its laws for any sequence, and plans replayed through it."""

import dataclasses
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memplan
from memplan.allocator import AllocatorConfig, CachingAllocator, OutOfMemory, Pool, rounded_bytes
from memplan.errors import InvalidValue
from memplan.files import toml_table
from memplan.hardware import VERDICTS
from memplan.hardware.overheads import OVERHEADS
from memplan.record import Alloc, Free, Stretch, allocs, chain, events, passed, repeated, unrolled
from memplan.replay.peaks import replayed
from memplan.replay.program import AllocatorProgram
from memplan.schedules import SCHEDULES
from memplan.shapes import FP32, Buffer
from memplan.tables import estimate_text
from memplan.units import GiB, KiB, MiB
from validate.cases import runnable

EXPANDABLE = AllocatorConfig(expandable_segments=True)


def held(*sizes: int, **config) -> CachingAllocator:
    """An allocator after these requests."""
    allocator = CachingAllocator(AllocatorConfig(**config))
    for n_bytes in sizes:
        allocator.malloc(n_bytes)
    return allocator


@pytest.mark.parametrize(
    "sizes, allocated_bytes, reserved_bytes",
    [
        ([1], 512, 2 * MiB),
        ([513], 1024, 2 * MiB),
        ([512 * KiB] * 4, 2 * MiB, 2 * MiB),
        ([512 * KiB] * 5, 2560 * KiB, 4 * MiB),
        ([1 * MiB, 1 * MiB + 1], 2 * MiB + 512, 22 * MiB),  # the small pool's last, the large pool's first
        ([2 * MiB] * 10, 20 * MiB, 20 * MiB),
        ([9 * MiB] * 3, 27 * MiB, 40 * MiB),  # of 20 MiB the second leaves 2; the third opens another
        ([10 * MiB], 10 * MiB, 10 * MiB),
        ([13 * MiB], 14 * MiB, 14 * MiB),  # a rest of 1 MiB is not split off, and counts as allocated
        ([12 * MiB + 512], 12 * MiB + 512, 14 * MiB),
    ],
)
def test_segments_by_hand(sizes, allocated_bytes, reserved_bytes):
    allocator = held(*sizes)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated_bytes, reserved_bytes)


def test_the_smallest_block_that_is_large_enough_serves():
    allocator = CachingAllocator()
    blocks = [allocator.malloc(n * MiB) for n in (40, 24, 30)]
    for block in blocks:
        allocator.free(block)
    assert allocator.malloc(22 * MiB).address == blocks[1].address
    assert allocator.malloc(23 * MiB).address == blocks[2].address
    assert allocator.reserved_bytes == 94 * MiB


def test_free_neighbours_are_one_block():
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 2, 0)):
        allocator = CachingAllocator()
        blocks = [allocator.malloc(4 * MiB) for _ in range(3)]
        for i in order:
            allocator.free(blocks[i])
        assert allocator.cached == ((20 * MiB, 0),)


def test_a_block_in_use_keeps_its_neighbours_apart():
    allocator = CachingAllocator()
    first, _, third = (allocator.malloc(6 * MiB) for _ in range(3))
    allocator.free(first)
    allocator.free(third)
    allocator.malloc(9 * MiB)
    assert allocator.reserved_bytes == 40 * MiB


def test_a_stream_does_not_use_another_streams_blocks():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(100 * MiB, "all-gather"))
    allocator.malloc(100 * MiB)
    assert allocator.reserved_bytes == 200 * MiB
    allocator.malloc(100 * MiB, "all-gather")
    assert allocator.reserved_bytes == 200 * MiB


def test_cached_segments_are_given_back_before_memory_runs_out():
    allocator = CachingAllocator(limit_bytes=100 * MiB)
    allocator.free(allocator.malloc(60 * MiB))
    allocator.malloc(80 * MiB)
    assert (allocator.reserved_bytes, allocator.n_retries) == (80 * MiB, 1)
    with pytest.raises(OutOfMemory, match="limit_bytes"):
        allocator.malloc(30 * MiB)


def test_a_segment_that_is_partly_in_use_is_not_given_back():
    allocator = CachingAllocator(limit_bytes=30 * MiB)
    blocks = [allocator.malloc(9 * MiB) for _ in range(2)]
    allocator.free(blocks[0])
    with pytest.raises(OutOfMemory):
        allocator.malloc(12 * MiB)


@pytest.mark.parametrize(
    "sizes, reserved_bytes",
    [([11 * MiB], 20 * MiB), ([11 * MiB] * 2, 40 * MiB), ([11 * MiB, 9 * MiB], 20 * MiB), ([1], 2 * MiB)],
)
def test_expandable_segments_grow_by_pages(sizes, reserved_bytes):
    assert held(*sizes, expandable_segments=True).reserved_bytes == reserved_bytes


def test_the_end_of_an_expandable_segment_is_the_last_choice():
    allocator = CachingAllocator(EXPANDABLE)
    first, _ = allocator.malloc(30 * MiB), allocator.malloc(25 * MiB)
    allocator.free(first)  # 30 MiB free ahead of 25 in use, 5 free at the end
    assert allocator.malloc(4 * MiB).address == 0
    allocator.malloc(40 * MiB)
    assert allocator.reserved_bytes == 100 * MiB


def test_expandable_pages_at_the_end_are_given_back():
    allocator = CachingAllocator(EXPANDABLE, limit_bytes=100 * MiB)
    allocator.free(allocator.malloc(100 * MiB))
    allocator.malloc(60 * MiB, "other")
    assert allocator.reserved_bytes == 60 * MiB


@pytest.mark.parametrize(
    "conf, rule",
    [
        ("max_split_size_mb:20", "above 20"),
        ("garbage_collection_threshold:1.5", "between 0 and 1"),
        ("expandable_segments:yes", "expandable_segments:True"),
        ("max_split_size_mb", "max_split_size_mb:128"),
        ("roundup_power2_divisions:4", "does not know"),
    ],
)
def test_settings_that_are_none_are_refused(conf, rule):
    with pytest.raises(InvalidValue, match=rule):
        AllocatorConfig.parse(conf)


def test_oversize_blocks_serve_no_small_request_and_are_given_back_for_large_ones():
    allocator = CachingAllocator(AllocatorConfig(max_split_bytes=32 * MiB), limit_bytes=100 * MiB)
    allocator.free(allocator.malloc(60 * MiB))
    allocator.malloc(12 * MiB)
    assert allocator.reserved_bytes == 72 * MiB
    allocator.malloc(38 * MiB)
    assert (allocator.reserved_bytes, allocator.n_retries) == (50 * MiB, 0)


def test_garbage_is_collected_only_where_the_process_is_limited():
    config = AllocatorConfig(garbage_collection_threshold=0.5)
    limit_bytes = 100 * MiB
    for allocator, reserved_bytes in (
        (CachingAllocator(config, limit_bytes=limit_bytes), 90 * MiB),
        (CachingAllocator(config, allowed_bytes=limit_bytes), 30 * MiB),
    ):
        allocator.free(allocator.malloc(60 * MiB))
        allocator.malloc(30 * MiB, "other")
        assert allocator.reserved_bytes == reserved_bytes


SIZES = st.sampled_from([1, 512, 700 * KiB, 1 * MiB, 1 * MiB + 1, 3 * MiB, 9 * MiB, 10 * MiB, 21 * MiB + 3])
REQUESTS = st.lists(st.tuples(SIZES, st.sampled_from(["", "other"]), st.integers(0, 3)), max_size=60)


@given(requests=REQUESTS, expandable=st.booleans())
def test_bytes_add_up_whatever_is_asked_and_freed(requests, expandable):
    allocator = CachingAllocator(AllocatorConfig(expandable_segments=expandable))
    live = []
    for n_bytes, stream, freed in requests:
        block = allocator.malloc(n_bytes, stream)
        live.append(block)
        assert rounded_bytes(n_bytes) <= block.n_bytes <= rounded_bytes(n_bytes) + 1 * MiB
        for _ in range(min(freed, len(live))):
            allocator.free(live.pop(0))
        free_bytes = sum(n for n, _ in allocator.cached)
        assert allocator.allocated_bytes == sum(b.n_bytes for b in live)
        assert allocator.reserved_bytes == allocator.allocated_bytes + free_bytes
    assert allocator.peak_reserved_bytes >= allocator.peak_allocated_bytes


@given(requests=REQUESTS, data=st.data(), expandable=st.booleans())
def test_the_order_of_frees_leaves_no_trace(requests, data, expandable):
    allocator = CachingAllocator(AllocatorConfig(expandable_segments=expandable))
    live = [allocator.malloc(n_bytes, stream) for n_bytes, stream, _ in requests]
    again = CachingAllocator(AllocatorConfig(expandable_segments=expandable))
    same = [again.malloc(n_bytes, stream) for n_bytes, stream, _ in requests]
    for block in live:
        allocator.free(block)
    for block in data.draw(st.permutations(same)):
        again.free(block)
    assert allocator.cached == again.cached


@given(n_bytes=SIZES, times=st.integers(1, 20), expandable=st.booleans())
def test_what_is_freed_and_asked_for_again_reserves_nothing_new(n_bytes, times, expandable):
    allocator = CachingAllocator(AllocatorConfig(expandable_segments=expandable))
    allocator.free(allocator.malloc(n_bytes))
    reserved_bytes = allocator.reserved_bytes
    for _ in range(times):
        allocator.free(allocator.malloc(n_bytes))
    assert allocator.reserved_bytes == reserved_bytes


@given(requests=REQUESTS)
def test_a_limit_that_is_never_reached_changes_nothing(requests):
    free = CachingAllocator()
    blocks = [free.malloc(n_bytes, stream) for n_bytes, stream, _ in requests]
    limited = CachingAllocator(limit_bytes=free.peak_reserved_bytes)
    again = [limited.malloc(n_bytes, stream) for n_bytes, stream, _ in requests]
    assert [b.address for b in again] == [b.address for b in blocks]
    assert limited.n_retries == 0


def with_equal_blocks(before, n_bytes, n, after, limit_bytes, *, counted: bool) -> list[object]:
    """What an allocator says of `n` equal blocks between other requests, every fourth of which is freed."""
    allocator = CachingAllocator(limit_bytes=limit_bytes)
    said: list[object] = []
    try:
        for i, (each, stream, _) in enumerate(before):
            block = allocator.malloc(each, stream)
            said.append(block.address)
            if i % 4 == 0:
                allocator.free(block)
        if counted:
            pool = allocator.pool_of(rounded_bytes(n_bytes), "")
            allocator.allocate_for_good(pool, rounded_bytes(n_bytes), n)
        else:
            held = [allocator.malloc(n_bytes) for _ in range(n)]
            assert len(held) == n
        said += [allocator.malloc(each, stream).address for each, stream, _ in after]
    except OutOfMemory as error:
        said.append(str(error))
    return [*said, allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, sorted(allocator.cached)]


@given(before=REQUESTS, n_bytes=SIZES, n=st.integers(0, 150), after=REQUESTS, quarters=st.integers(0, 4))
def test_equal_blocks_that_are_only_counted_are_as_if_each_was_taken(before, n_bytes, n, after, quarters):
    """The driver's limit is `quarters` fourths of the bytes of all blocks, plus 20 MiB; 0: no limit."""
    limit_bytes = quarters * n * n_bytes // 4 + 20 * MiB if quarters else None
    counted = with_equal_blocks(before, n_bytes, n, after, limit_bytes, counted=True)
    assert counted == with_equal_blocks(before, n_bytes, n, after, limit_bytes, counted=False)


def buffer(n_mib: int, kind="temporaries") -> Buffer:
    return Buffer("b", (n_mib,), FP32, n_mib * MiB, kind)


def literal(stretch: Stretch) -> Stretch:
    """The same step with every repetition written out, and its passes named."""
    if not stretch.has_passes:
        return chain("step", *(events(name, [event]) for name, event in unrolled(stretch)))
    once = [literal(part) for part in stretch.parts]
    if stretch.stage_pass is not None:
        once = [passed(*stretch.stage_pass, *once)]
    return chain("step", *once * stretch.repeats)


def test_repetitions_that_change_nothing_may_be_left_out():
    sizes = [buffer(n) for n in (3, 30, 11, 64)]
    micro_batch = events("micro-batch", [*(Alloc(b) for b in sizes), *(Free(b) for b in sizes)])
    kept = buffer(17)
    step = chain("step", events("start", [Alloc(kept)]), repeated(micro_batch, 50))
    program = AllocatorProgram(setup=allocs(*[buffer(40, "weights")] * 3), step=step)
    assert replayed(program) == replayed(dataclasses.replace(program, step=literal(step)))


def test_the_optimizer_state_comes_with_the_first_update():
    """It lands in what the first step's activations have left: the second one's need more."""
    activation, state = buffer(100), buffer(60, "optimizer")
    work = events("work", [Alloc(activation), Free(activation)])
    program = AllocatorProgram(
        setup=(), step=chain("step", work, events("update", ())), states=(state,), update_name="update"
    )
    assert replayed(program).reserved_bytes == 200 * MiB
    there = dataclasses.replace(program, setup=allocs(state), states=())
    assert replayed(there).reserved_bytes == 160 * MiB


def test_a_block_frees_its_input_when_it_has_made_its_output():
    """Both are one buffer. What is freed lies at the start of the segment, and is too little for the head."""
    handed, held_by_code, of_head = buffer(4), buffer(4), buffer(9)
    step = chain(
        "step",
        events("embedding", allocs(handed, held_by_code)),
        events("block", [Alloc(handed), Free(handed)]),
        events("head", [Free(held_by_code), Alloc(of_head), Free(of_head), Free(handed)]),
    )
    program = AllocatorProgram(setup=(), step=step, handed_on=frozenset([handed]))
    assert replayed(program).reserved_bytes == 40 * MiB
    assert replayed(dataclasses.replace(program, handed_on=frozenset())).reserved_bytes == 20 * MiB


SMALL = dataclasses.replace(runnable("llama-3-8b"), n_layers=12, d_model=1024, d_ff=3584, d_head=32)

PLANS = [
    {"dp": 8, "zero": 3},
    {"dp": 4, "zero": 0},
    {"dp": 4, "zero": 2, "global_batch": 16},
    {"dp": 2, "tp": 2, "zero": 1, "sequence_parallel": True},
    {"pp": 2, "dp": 2, "zero": 2, "global_batch": 16, "recompute": "full"},
    {"pp": 4, "schedule": "interleaved-1f1b", "virtual_stages": 3, "global_batch": 8},
    {"dp": 2, "set_to_none": False, "clip_grad_norm": 1.0, "precision": "bf16"},
    {"dp": 2, "dp_replicate": 2, "zero": 3, "fsdp_units": "block+ends", "offload": True},
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: " ".join(map(str, plan.values())))
def test_a_plan_replayed_is_the_plan_estimated(plan):
    """Allocated: the estimate's peak, cuBLAS's workspaces, and what rounding adds."""
    e = memplan.estimate(SMALL, seq_len=512, **plan)
    for stage in e.stages:
        replay = stage.replayed
        assert replay.settled
        assert stage.peak_bytes <= replay.allocated_bytes <= stage.peak_bytes * 1.05 + 40 * MiB
        assert replay.allocated_bytes <= replay.reserved_bytes
        assert stage.replay(limit_bytes=replay.reserved_bytes) == replay


@pytest.mark.parametrize("plan", PLANS[:6], ids=lambda plan: " ".join(map(str, plan.values())))
def test_left_out_repetitions_of_a_plan_change_nothing(plan):
    e = memplan.estimate(SMALL, seq_len=512, **plan)
    program = e.worst.program()
    updates = program.update_name
    parts = [part if part.name == "update" else literal(part) for part in program.step.parts if part.repeats]
    assert updates
    written_out = dataclasses.replace(program, step=chain("step", *parts))
    assert replayed(written_out) == replayed(program)


COUNTED: list[dict[str, Any]] = [
    {"schedule": "gpipe", "seq_len": 96},
    {"schedule": "1f1b", "seq_len": 1024},
    {"schedule": "looped-bfs", "virtual_stages": 2, "seq_len": 384},
    {"schedule": "zero-bubble", "virtual_stages": 2, "seq_len": 1024},
    {"schedule": "zbv", "virtual_stages": 2, "seq_len": 1024},
]


@pytest.mark.parametrize("m", [12, 40])
@pytest.mark.parametrize("plan", COUNTED, ids=lambda plan: " ".join(map(str, plan.values())))
def test_receive_buffers_that_are_counted_are_as_if_each_was_taken(plan, m, monkeypatch):
    """In the reference each is allocated alone, and every loop's states are compared."""
    e = memplan.estimate(SMALL, pp=4, global_batch=m, **plan)
    programs = [stage.program() for stage in e.stages]
    counted = [replayed(program) for program in programs]
    monkeypatch.setattr("memplan.allocator.MOST_MARKS", 0)
    monkeypatch.setattr(
        "memplan.replay.steps._Replay._may_recur", lambda _, loop: loop.repeats > 2 and not loop.net_bytes
    )
    assert [replayed(program) for program in programs] == counted


LIMIT_S = 20.0


def of_a_million(schedule: str) -> memplan.Estimate:
    """Its peaks are not worked out yet; there are as many receive buffers as micro-batches."""
    planned = SCHEDULES.named(schedule)
    virtual_stages = planned.stages_per_rank or planned.fewest_stages
    plan: dict[str, Any] = {"pp": 4, "schedule": schedule, "virtual_stages": virtual_stages, "seq_len": 1024}
    return memplan.estimate(SMALL, global_batch=1_000_000, **plan)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs"])
def test_a_million_micro_batches_take_seconds(schedule):
    start = time.process_time()
    assert of_a_million(schedule).reserved_bytes > 1_000_000 * 2 * MiB  # of each receive buffer
    assert time.process_time() - start < LIMIT_S


@pytest.mark.parametrize("schedule", ["zero-bubble", "zbv", "dualpipe-v"])
def test_a_million_micro_batches_of_which_nothing_repeats_are_refused_in_seconds(schedule):
    start = time.process_time()
    with pytest.raises(InvalidValue, match=r"at most [25]0?,000,000 .* use fewer micro-batches"):
        _ = of_a_million(schedule).reserved_bytes
    assert time.process_time() - start < LIMIT_S


FEW_BLOCKS = dataclasses.replace(SMALL, n_layers=4)

BY_AGE: list[dict[str, Any]] = [
    {"dp": 2, "zero": 1, "global_batch": 64},
    {"dp": 2, "global_batch": 24, "recompute": "full", "set_to_none": False},
    {"dp": 2, "zero": 2, "global_batch": 40, "precision": "fp32"},
    {"pp": 2, "global_batch": 30, "schedule": "1f1b"},
]


@pytest.mark.parametrize("plan", BY_AGE, ids=lambda plan: " ".join(map(str, plan.values())))
def test_what_is_left_out_of_a_plan_of_torch_2_12_changes_nothing(plan, monkeypatch):
    """There the oldest of equal free blocks is taken; all that is left out is played in the reference."""
    program = memplan.estimate(FEW_BLOCKS, seq_len=96, torch_version="2.12", **plan).worst.program()
    some = replayed(program)
    parts = [part if part.name == "update" else literal(part) for part in program.step.parts if part.repeats]
    monkeypatch.setattr("memplan.ages.Ages.repeat", lambda self, before, now, most: (0, now))
    every = replayed(dataclasses.replace(program, step=chain("step", *parts)))
    assert every.after_step[: some.n_steps] == some.after_step
    assert set(every.after_step[some.n_steps :]) <= {some.after_step[-1]}


def test_peaks_of_which_reserved_bytes_grow_less_than_allocated_ones_are_not_extrapolated():
    """Reserved bytes grow by whole segments: not at all in three micro-batches, then by 2 MiB."""
    model = dataclasses.replace(SMALL, n_layers=8, d_model=64, n_heads=4, n_kv_heads=2, d_head=16, d_ff=128)
    model = dataclasses.replace(model, vocab_size=512)
    e = memplan.estimate(
        model, pp=2, dp=2, zero=2, global_batch=80, seq_len=17, schedule="gpipe", precision="fp32",
        optimizer="sgd-momentum", torch_version="2.12",
    )  # fmt: skip
    replay = e.stages[0].replayed
    assert replay.allocated_bytes <= replay.reserved_bytes


def test_peaks_that_grow_equally_by_chance_are_not_extrapolated(monkeypatch):
    """Three micro-batches reserve another 2 MiB twice, and then sometimes not, since segments fill up."""
    model = dataclasses.replace(SMALL, n_layers=4, d_model=64, n_heads=4, n_kv_heads=2, d_head=16, d_ff=128)
    e = memplan.estimate(
        dataclasses.replace(model, vocab_size=512), pp=2, dp=3, zero=3, global_batch=90, seq_len=100,
        schedule="looped-bfs", virtual_stages=2, precision="fp32", optimizer="sgd", recompute="full",
        set_to_none=False, torch_version="2.13",
    )  # fmt: skip
    program = e.stages[1].program()
    found = replayed(program)
    monkeypatch.setattr("memplan.replay.peaks.FEW", 100)
    assert found.after_step == replayed(program).after_step


@pytest.mark.parametrize("model", ["gpt2-medium", "gemma-2-2b"])
def test_the_ages_of_blocks_cost_few_requests(model, monkeypatch):
    requests = []
    allocate = CachingAllocator.allocate

    def counted(self: CachingAllocator, pool: Pool, n_bytes: int) -> int:
        requests.append(n_bytes)
        return allocate(self, pool, n_bytes)

    monkeypatch.setattr(CachingAllocator, "allocate", counted)
    counts = []
    for version in ("2.13", "2.12"):
        requests.clear()
        e = memplan.estimate(model, dp=2, zero=1, global_batch=128, torch_version=version)
        assert e.worst.replayed.settled
        counts.append(len(requests))
    assert counts[1] < 3 * counts[0]


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_of_many_micro_batches_some_suffice(schedule, monkeypatch):
    """Zero-bubble's leave something each, so that no repetition leaves everything as an earlier one has."""
    e = memplan.estimate(
        SMALL, pp=2, schedule=schedule, virtual_stages=1 if schedule == "1f1b" else 2,
        global_batch=64, seq_len=256,
    )  # fmt: skip
    program = e.worst.program()
    some = replayed(program)
    monkeypatch.setattr("memplan.replay.peaks.FEW", 10_000)
    assert replayed(program).after_step == some.after_step


def test_an_fsdp2_stage_of_8b_settles_and_reserves_more_than_it_uses():
    e = memplan.estimate("llama-3-8b", cluster="8xh100-sxm", zero=3, micro_batch=1, seq_len=4096)
    ordinary = e.worst.replayed
    expandable = e.worst.replay("expandable_segments:True")
    assert e.reserved_bytes == ordinary.reserved_bytes
    assert 1.1 < ordinary.reserved_bytes / e.peak.total_bytes < 1.3
    assert expandable.allocated_bytes <= expandable.reserved_bytes < ordinary.reserved_bytes


def test_the_device_holds_an_interval_and_the_verdict_is_drawn_from_it():
    for margin in (0.0, 0.05, 0.2):
        verdicts = {}
        for micro_batch in range(1, 13, 2):
            e = memplan.estimate(
                "llama-3-8b", cluster="8xa100-80-sxm", zero=3, recompute="selective", micro_batch=micro_batch,
                seq_len=2048, margin=margin,
            )  # fmt: skip
            low, high = e.device_bytes
            usable = e.cluster.gpu.usable_bytes
            verdicts[micro_batch] = e.verdict
            assert e.worst.replayed.allocated_bytes + 300 * MiB <= low < high
            assert high >= e.reserved_bytes + 1008 * MiB
            assert (e.verdict == "fits") == (high <= int(usable * (1 - margin)))
            assert (e.verdict == "does not fit") == (low > usable)
            said = {"fits": True, "fits, tight": True, "does not fit": False, "cannot say": None}
            assert e.fits is said[e.verdict]
        found = list(dict.fromkeys(verdicts.values()))
        assert found == [verdict for verdict in VERDICTS if verdict in found]
        assert len(found) > 1


def test_a_momentum_is_as_large_as_the_gradient_it_is_a_clone_of():
    """That of an embedding that is divided over a tensor axis is whole."""
    e = memplan.estimate("llama-3-8b", cluster="4xh100-sxm", tp=4, recompute="full", optimizer="sgd-momentum",
                         micro_batch=2, global_batch=2, seq_len=128, precision="bf16")  # fmt: skip
    assert e.worst.replayed.allocated_bytes >= e.worst.peak_bytes


@pytest.mark.parametrize("name", ["mistral-7b", "phi-4", "qwen3-8b", "olmo-2-7b"])
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_the_first_of_several_stages_frees_the_embedding_that_it_made(name, zero):
    e = memplan.estimate(name, cluster="4xh100-sxm", pp=2, zero=zero, precision="bf16", seq_len=512,
                         global_batch=16)  # fmt: skip
    for stage in e.stages:
        assert all(n >= 0 for n in stage.alive.values())
        assert stage.replayed.allocated_bytes >= stage.peak_bytes


@pytest.mark.parametrize("tp, zero, settles", [(2, 2, True), (1, 3, False)])
def test_a_plan_fits_by_giving_blocks_back_only_if_the_allocator_s_state_recurs(tp, zero, settles):
    """Otherwise each step is fragmented differently from the last: a later one may run out of memory."""
    e = memplan.estimate(
        "llama-2-7b", implementation="reference", cluster="8xa100-40-sxm", tp=tp, zero=zero, global_batch=64
    )
    assert e.verdict == ("fits, tight" if settles else "cannot say")
    (within,) = [found for limit, found in e.worst.replays.items() if limit is not None]
    assert within.n_retries
    assert within.settled == settles
    assert within.reserved_bytes < e.reserved_bytes < e.device_bytes.high_bytes


@pytest.mark.parametrize("cluster, engine", [("4xcpu", "torch"), ("4xh100-sxm", "textbook")])
def test_no_caching_allocator_no_verdict(cluster, engine):
    e = memplan.estimate("gpt2", cluster=cluster, engine=engine)
    assert (e.reserved_bytes, e.device_bytes, e.verdict) == (None, None, None)
    assert e.worst.replay() is None
    assert "Reserved" not in str(e)


def test_without_a_cluster_there_is_an_interval_but_no_verdict():
    e = memplan.estimate("gpt2", seq_len=256)
    assert e.verdict is None
    assert e.to_dict()["device_bytes"] == e.device_bytes._asdict()
    assert e.to_dict()["reserved_bytes"] == e.reserved_bytes
    assert "The caching allocator allocates" in estimate_text(e, details=True)


def test_hopper_has_larger_workspaces():
    def workspace_bytes(gpu: str) -> int:
        beside = memplan.estimate("gpt2", cluster=f"1x{gpu}", seq_len=256).worst.program().beside
        return sum(brought.n_bytes for _, brought in beside)

    assert [workspace_bytes(gpu) for gpu in ("a100-80-sxm", "h100-sxm")] == [2 * 8320 * KiB, 64 * MiB]


def test_every_overhead_says_where_it_stands():
    for entry in toml_table(OVERHEADS).values():
        assert entry["source"]
        assert entry["retrieved"]
        low, high = entry.get("low_mib", entry.get("mib")), entry.get("high_mib", entry.get("mib"))
        assert 0 <= low <= high < GiB


@pytest.mark.parametrize("schedule", SCHEDULES.own)
def test_the_allocator_holds_no_less_than_the_peak(schedule):
    """So that a peak beyond what is usable needs no replay to be too much."""
    asked: dict[str, Any] = {"dp": 2, "pp": 2, "zero": 2, "seq_len": 2048, "global_batch": 48}
    asked["virtual_stages"] = 1 if schedule in ("1f1b", "gpipe", "zero-bubble") else 2
    for recompute in ("none", "full"):
        e = memplan.estimate(SMALL, recompute=recompute, schedule=schedule, **asked)
        for stage in e.stages:
            assert stage.replayed.allocated_bytes >= stage.peak_bytes
