"""The record of a step: stretches by hand, and any tree of them against its unrolled events."""

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.memory import Bytes, Instant, alive_at_high, bytes_by_kind, instants, running_bytes
from memplan.record import (
    AddToIncoming,
    Alloc,
    Collective,
    Compute,
    ComputeKind,
    Event,
    Free,
    PassPart,
    Stretch,
    chain,
    events,
    passed,
    repeated,
)
from memplan.shapes import FP32, Buffer


def buffer(n_bytes: int, name: str = "b", kind="temporaries") -> Buffer:
    return Buffer(name, (n_bytes,), FP32, n_bytes, kind)


def steps(*deltas: int, name: str = "s") -> Stretch:
    """A stretch that allocates (positive) and frees (negative) buffers of these bytes, of its own each."""
    return events(name, [(Alloc if delta > 0 else Free)(buffer(abs(delta))) for delta in deltas])


def figures(stretch: Stretch) -> tuple[int, int]:
    return stretch.net_bytes, stretch.high_bytes


def alive(stretch: Stretch) -> tuple[int, str]:
    """The bytes that `alive_at_high` finds, and the instant's name."""
    counts: Counter[Buffer] = Counter()
    when = alive_at_high(stretch, counts)
    return sum(n * b.n_bytes for b, n in counts.items()), when


@pytest.mark.parametrize(
    "deltas, net_bytes, high_bytes",
    [
        ((), 0, 0),
        ((5,), 5, 5),
        ((5, -5), 0, 5),
        ((5, 7, -5), 7, 12),
        ((5, -5, 7), 7, 7),
        ((-4, 3), -1, 0),
        ((-4, 9, -5), 0, 5),
    ],
)
def test_events(deltas, net_bytes, high_bytes):
    assert figures(steps(*deltas)) == (net_bytes, high_bytes)


def test_an_event_that_moves_nothing_is_left_out():
    mark, real = AddToIncoming(buffer(100)), Alloc(buffer(3))
    stretch = events("s", [mark, real, mark])
    assert stretch.events == (real,)
    assert figures(stretch) == (3, 3)


@pytest.mark.parametrize(
    "parts, net_bytes, high_bytes",
    [
        ([], 0, 0),
        ([(5,), (7, -7)], 5, 12),
        ([(5, -5), (7, -7)], 0, 7),
        ([(20, -20), (5,), (7, -7)], 5, 20),
        ([(-6,), (7,)], 1, 1),
    ],
)
def test_chain(parts, net_bytes, high_bytes):
    assert figures(chain("c", *(steps(*part) for part in parts))) == (net_bytes, high_bytes)


@pytest.mark.parametrize(
    "deltas, n, net_bytes, high_bytes",
    [
        ((10, -4), 1, 6, 10),
        ((10, -4), 3, 18, 22),  # grows by 6: highest in the last repetition, 2 x 6 + 10
        ((4, -10), 3, -18, 4),  # shrinks: highest in the first
        ((8, -8), 5, 0, 8),
        ((-5,), 4, -20, 0),
        ((10, -4), 0, 0, 0),
        ((10, -4), -1, 0, 0),
    ],
)
def test_repeated(deltas, n, net_bytes, high_bytes):
    assert figures(repeated(steps(*deltas), n)) == (net_bytes, high_bytes)


def test_what_is_alive_at_the_high_of_repetitions_that_grow():
    kept, short_lived = buffer(6, "kept"), buffer(4, "short-lived")
    part = events("block", [Alloc(kept), Alloc(short_lived), Free(short_lived)])
    counts: Counter[Buffer] = Counter()
    assert alive_at_high(repeated(part, 3), counts) == "block, repetition 3 of 3"
    assert +counts == Counter({kept: 3, short_lived: 1})


def test_what_is_alive_at_the_high_of_repetitions_that_shrink():
    old, gradient = buffer(6, "old"), buffer(4, "gradient")
    part = events("block", [Alloc(gradient), Free(gradient), Free(old)])
    counts = Counter({old: 3})
    assert alive_at_high(repeated(part, 3), counts) == "block, repetition 1 of 3"
    assert +counts == Counter({old: 3, gradient: 1})


def test_nested_repetitions_are_named_from_the_inside():
    inner = repeated(steps(5, 3, -3, name="block"), 2)
    assert alive(repeated(chain("micro-batch", inner, steps(-10, name="end")), 4)) == (
        13,
        "block, repetition 2 of 2, repetition 1 of 4",
    )


def test_a_stretch_that_only_frees_has_its_high_before_it_starts():
    a = buffer(5)
    counts = Counter({a: 1})
    alive_at_high(events("end", [Free(a)]), counts)
    assert counts == Counter({a: 1})


def test_bytes_by_kind_add_up():
    parts = bytes_by_kind(Counter({buffer(3, kind="weights"): 2, buffer(5, kind="grads"): 1, buffer(7): 0}))
    assert parts == Bytes(weights_bytes=6, grads_bytes=5)
    assert parts.total_bytes == 11
    assert parts.to_dict()["total_bytes"] == 11


def test_instants_of_repetitions_are_their_first_and_last():
    step = chain(
        "step",
        steps(2, name="a"),
        repeated(steps(3, 4, -4, name="b"), 3),
        repeated(steps(9), 0),
        steps(-2, 1),
    )
    assert instants(step, 100) == [
        Instant(when="a", total_bytes=102),
        Instant(when="b, repetition 1 of 3", total_bytes=109),
        Instant(when="b, repetition 3 of 3", total_bytes=115),
        Instant(when="s", total_bytes=111),
    ]


def test_running_bytes_are_every_event_in_order():
    step = chain("step", steps(2, name="a"), repeated(steps(3, -1, name="b"), 2))
    assert list(running_bytes(step, 10)) == [("a", 12), ("b", 15), ("b", 14), ("b", 17), ("b", 16)]


# Any tree

leaves = st.lists(st.integers(-9, 9).filter(bool), max_size=5).map(lambda deltas: steps(*deltas))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda parts: chain("c", *parts)),
        st.tuples(inner, st.integers(0, 4)).map(lambda chosen: repeated(*chosen)),
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(trees, st.integers(0, 50))
def test_any_trees_figures_are_those_of_its_unrolled_events(tree, start):
    held = [start, *(n_bytes for _, n_bytes in running_bytes(tree, start))]
    assert figures(tree) == (held[-1] - start, max(held) - start)
    assert max([start, *(instant.total_bytes for instant in instants(tree, start))]) == max(held)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(trees)
def test_what_is_alive_at_any_trees_high_adds_up_to_it(tree):
    assert alive(tree)[0] == tree.high_bytes


# Counts

SENT: list[Event] = [
    Collective(kind="all_gather", axis="dp", what="weights", payload_bytes=8, stream="gather"),
    Collective(kind="reduce_scatter", axis="dp", what="gradients", payload_bytes=8, stream="reduce"),
    Compute(kind=ComputeKind.UNKNOWN, phase="forward", flops=5, shape=(2, 2), dtype=FP32),
]
PARTS: list[PassPart] = ["forward", "backward"]
counted = st.recursive(
    st.lists(st.sampled_from([*SENT, Alloc(buffer(4))]), max_size=4).map(lambda found: events("s", found)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda parts: chain("c", *parts)),
        st.tuples(inner, st.integers(0, 4)).map(lambda chosen: repeated(*chosen)),
    ),
    max_leaves=10,
)
passes = st.tuples(st.sampled_from(PARTS), st.lists(counted, max_size=3)).map(
    lambda chosen: passed(0, chosen[0], *chosen[1])
)
schedules = st.recursive(
    st.one_of(passes, counted),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda parts: chain("c", *parts)),
        st.tuples(inner, st.integers(0, 3)).map(lambda chosen: repeated(*chosen)),
    ),
    max_leaves=8,
)


def one_by_one(stretch: Stretch) -> Counter[object]:
    """What occurs in a stretch, with each repetition counted on its own."""
    found: Counter[object] = Counter()
    for _ in range(stretch.repeats):
        found.update(event for event in stretch.events if event in SENT)
        for part in stretch.parts:
            found.update(one_by_one(part))
    return found


@settings(max_examples=300, deadline=None, derandomize=True)
@given(schedules)
def test_any_schedules_counts_are_those_of_its_unrolled_events(tree):
    assert +Counter(tree.counts) == +one_by_one(tree)


IN_A_PROCESS = """
import memplan
from memplan.record import unrolled

plan = {"pp": 2, "schedule": "zero-bubble", "recompute": "full", "global_batch": 2, "seq_len": 64}
for stage in memplan.estimate("llama-3-8b", device="cpu", **plan).stages:
    for name, event in unrolled(stage.record.step):
        print(name, type(event).__name__, event.buffer)
"""


def test_records_are_the_same_in_every_process():
    """Sets of objects are in the order of their addresses, which differ from process to process."""
    command = [sys.executable, "-c", IN_A_PROCESS]
    said = {subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(5)}
    assert len(said) == 1
