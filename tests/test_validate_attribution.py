"""Which predicted tensor each measured block is: by bytes, order and being alive; never by a sum."""

from collections import Counter

import pytest

from memplan import Plan
from memplan.record import Alloc, Free, chain, events, repeated
from memplan.shapes import FP32, Buffer
from memplan.snapshot import Block, MemoryEvent
from validate.attribution import Comparison, comparison
from validate.blocks import alive_after
from validate.cases import Case
from validate.launch import run_case
from validate.memory import OTHER_THREADS
from validate.suites.models import GPT, LLAMA

CASES = [
    Case(
        name="two stages of shards", model=LLAMA, plan=Plan(pp=2, dp=2, zero=3, seq_len=64, precision="fp32")
    ),
    Case(name="two tensor ranks, DDP", model=GPT, plan=Plan(dp=2, tp=2, seq_len=64, precision="bf16")),
]


def buffer(name, n_bytes, kind="temporaries"):
    return Buffer(name, (n_bytes // 4,), FP32, n_bytes, kind)


def measured(*steps):
    """Events of (bytes, address), each a nanosecond after the one before; address 0 is another thread."""
    total, found = 0, []
    for time_ns, (n_bytes, pointer) in enumerate(steps, start=100):
        total += n_bytes
        path = OTHER_THREADS if pointer == 0 else f"op {pointer}"
        found.append(
            MemoryEvent(time_ns=time_ns, n_bytes=n_bytes, pointer=pointer, total_bytes=total, path=path)
        )
    return found


def block(n_bytes, pointer, kind="", path=""):
    return Block(n_bytes=n_bytes, pointer=pointer, born_ns=pointer, path=path, kind=kind)


def pointers(blocks):
    return [block.pointer for block in blocks]


def test_blocks_alive_are_those_allocated_and_not_freed():
    found = measured((8, 1), (16, 2), (-8, 1), (4, 3), (-4, 3), (4, 1))
    assert pointers(alive_after(found, 4)) == [2, 3]
    assert pointers(alive_after(found, 6, held=[block(2, 9)])) == [9, 2, 1]


def test_what_another_thread_frees_is_a_block_that_no_event_frees():
    seen_later = measured((8, 1), (8, 2), (-8, 0), (-8, 1))
    assert pointers(alive_after(seen_later, 3)) == [1]
    reused = measured((8, 1), (8, 2), (-8, 0), (4, 2))
    assert pointers(alive_after(reused, 3)) == [1]
    several = measured((8, 1), (4, 2), (16, 3), (-12, 0))
    assert pointers(alive_after(several, 4)) == [3]
    assert pointers(alive_after(measured((8, 1), (8, 2), (-8, 0)), 3, kept={1})) == [1]
    at_once = measured((16, 1), (8, 2), (8, 3), (-16, 0), (4, 2), (4, 3))
    assert pointers(alive_after(at_once, 4)) == [1]
    later = measured((8, 1), (8, 2), (8, 3), (-8, 0), (-8, 0), (4, 3), (4, 2))
    assert pointers(alive_after(later, 5)) == [1]
    assert pointers(alive_after(measured((8, 1), (-4, 0)), 2)) == [1]


def compared(step, found, *, rest=None, held=()):
    held_bytes = sum(block.n_bytes for block in held)
    moved = [event._replace(total_bytes=event.total_bytes + held_bytes) for event in found]
    return Comparison(rest=Counter(rest or {}), step=step, held=held, events=moved).attribution()


def test_equal_bytes_in_order_and_alive_are_the_same_tensor():
    a, b, c = buffer("a", 8), buffer("b", 16), buffer("c", 8)
    step = events("s", [Alloc(a), Alloc(b), Alloc(c), Free(a)])
    found = compared(step, measured((8, 1), (16, 2), (8, 3), (-8, 1)))
    assert found.fraction == 1.0
    assert [(k.blocks[0].pointer, k.tensors[0].name) for k in found.known] == [(1, "a"), (2, "b"), (3, "c")]


def test_a_block_that_is_not_predicted_and_a_tensor_that_is_not_measured_are_named():
    a, b = buffer("a", 8), buffer("b", 64)
    found = compared(events("s", [Alloc(a), Alloc(b)]), measured((8, 1), (32, 2)))
    assert pointers(found.unexplained) == [2]
    assert [tensor.name for tensor in found.unmeasured] == ["b"]
    assert found.fraction == 8 / 40


def test_sums_that_are_near_or_equal_explain_nothing():
    a = buffer("a", 40)
    found = compared(events("s", [Alloc(a)]), measured((20, 1), (20, 2)))
    assert (found.attributed_bytes, found.peak_bytes, found.predicted_bytes) == (0, 40, 40)


def test_a_tensor_freed_before_the_predicted_peak_is_no_block_alive_at_the_measured_one():
    a, b = buffer("a", 8), buffer("b", 64)
    step = events("s", [Alloc(a), Free(a), Alloc(b)])
    found = compared(step, measured((8, 1), (64, 2)))
    assert [known.tensors[0].name for known in found.known] == ["b"]
    assert pointers(found.unexplained) == [1]


def test_which_of_equal_tensors_is_freed_is_seen_in_the_measurement():
    saved, other, last = buffer("blocks.*.saved", 8), buffer("blocks.*.other", 24), buffer("last", 64)
    forward = repeated(events("forward", [Alloc(saved), Alloc(other)]), 2)
    step = chain("step", forward, events("backward", [Free(saved), Free(other), Alloc(last)]))
    oldest_first = measured((8, 1), (24, 2), (8, 3), (24, 4), (-8, 1), (-24, 2), (64, 5))
    mixed = measured((8, 1), (24, 2), (8, 3), (24, 4), (-8, 1), (-24, 4), (64, 5))
    for seen, alive in ((oldest_first, [3, 4, 5]), (mixed, [2, 3, 5])):
        found = compared(step, seen)
        assert found.fraction == 1.0
        assert [pointers(known.blocks)[0] for known in found.known] == alive


def test_states_between_steps_are_known_by_their_kind_and_parts_by_their_exact_sum():
    rest = {
        buffer("w", 64, "weights"): 1,
        buffer("w (padding)", 4): 1,
        buffer("w.exp_avg", 68, "optimizer"): 1,
        buffer("w (DDP bucket)", 24): 2,
        buffer("rotation", 16): 1,
    }
    held = [block(68, 1, "weights"), block(68, 2, "optimizer"), block(40, 3), block(8, 4), block(16, 5)]
    a = buffer("a", 8)
    found = compared(events("s", [Alloc(a)]), measured((8, 9)), rest=rest, held=held)
    assert found.fraction == 1.0
    named = {pointers(known.blocks)[0]: [t.name for t in known.tensors] for known in found.known}
    assert named[1] == ["w", "w (padding)"]
    assert named[2] == ["w.exp_avg"]
    assert named[3] == ["w (DDP bucket)", "w (DDP bucket)"]


def test_bytes_that_may_have_been_freed_are_not_attributed():
    a = buffer("a", 24)
    found = compared(events("s", [Alloc(a)]), measured((24, 1), (-5, 0), (5, 2)))
    assert found.lost_bytes == 0
    assert found.fraction == 1.0
    lost = compared(events("s", [Alloc(a)]), measured((24, 1), (-5, 0), (8, 2)))
    assert lost.lost_bytes == 5
    assert lost.attributed_bytes == 24 - 5
    assert lost.fraction < 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_at_least_99_percent_of_a_real_peak_is_attributed(case):
    ended = run_case(case, keep_events=True)
    assert ended.outcome == "ok", ended.reason
    for rank in ended.ranks:
        found = comparison(case, rank).attribution()
        assert found.peak_bytes == rank.memory.peak_bytes
        assert found.fraction == rank.attributed_fraction
        assert 0.99 < found.fraction <= 1.0
