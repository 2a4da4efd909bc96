"""torchtitan's loss in chunks: what is alive, what is gathered and reduced, what has no rule beside it."""

from typing import Any

import pytest

import memplan
from memplan import MissingRule, PlanRefused
from memplan.launchers import read
from memplan.record import Alloc, unrolled
from memplan.units import GiB

SHARDED: dict[str, Any] = {
    "implementation": "torchtitan", "cluster": "8xh100-sxm", "dp": 8, "zero": 3, "fsdp_units": "block+ends",
    "seq_len": 4096, "recompute": "full", "clip_grad_norm": 1.0,
}  # fmt: skip
CHUNKS: dict[str, Any] = {"chunked_loss": "ChunkedLossWrapper", "loss_chunks": 4}
ALONE: dict[str, Any] = {
    "implementation": "torchtitan", "precision": "bf16", "optimizer": "sgd", "seq_len": 1024,
}  # fmt: skip


def estimated(asked, **others):
    return memplan.estimate("llama-3-8b", **{**asked, **others})


def made(found):
    """The buffers in the order in which they are allocated."""
    events = [event for _, event in unrolled(found.worst.record.step)]
    return [event.buffer for event in events if isinstance(event, Alloc)]


def test_the_logits_of_a_piece_are_made_at_a_time():
    for asked in (SHARDED, ALONE):
        shapes = [one.shape for one in made(estimated(asked, **CHUNKS))]
        assert {shape[1] for shape in shapes if shape[2:] == (128_256,)} == {asked["seq_len"] // 4}
        assert estimated(asked, **CHUNKS).worst.states == estimated(asked).worst.states
    whole, pieces = (estimated(SHARDED, seq_len=8192, **asked).peak.total_bytes for asked in ({}, CHUNKS))
    assert pieces < whole - 4 * GiB


def test_the_heads_unit_is_gathered_three_times_and_its_weights_are_reduced_one_by_one():
    whole, pieces = estimated(SHARDED), estimated(SHARDED, **CHUNKS)
    sent = [{one.kind: one for one in found.collectives if one.axis == "dp"} for found in (whole, pieces)]
    head = 2 * (128_256 * 4096 + 4096)
    calls = [{kind: one.calls for kind, one in found.items()} for found in sent]
    assert calls[1]["all_gather"] == calls[0]["all_gather"] + 1
    assert calls[1]["reduce_scatter"] == calls[0]["reduce_scatter"] + 1
    moved = [{kind: one.payload_bytes for kind, one in found.items()} for found in sent]
    assert moved[1]["all_gather"] - moved[0]["all_gather"] == head
    assert moved[1]["reduce_scatter"] == moved[0]["reduce_scatter"]


def test_the_reduction_of_the_output_layer_comes_before_the_backward_pass():
    names = [one.name for one in made(estimated(SHARDED, **CHUNKS))]
    order = ["output layer (reduce-scatter input)", "last norm (reduce-scatter input)"]
    places = [names.index(one) for one in (*order, "block (reduce-scatter input)")]
    assert places == sorted(places)
    assert names.index("grad of the last norm's output") in range(places[0], places[1])


def test_gradients_of_pieces_are_added_to_those_of_the_micro_batch_before():
    one, two = (estimated(ALONE, **CHUNKS, global_batch=n) for n in (1, 2))
    assert two.peak.total_bytes >= one.peak.total_bytes
    assert two.worst.states == one.worst.states


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"loss_chunks": 7}, PlanRefused, "loss_chunks=7 does not divide seq_len=4096"),
    ({"implementation": "huggingface"}, MissingRule, "use implementation='torchtitan'"),
    ({"zero": 2}, MissingRule, "with zero=2 has no rule yet; use zero=3"),
    (
        {"zero": 0, "fsdp_units": "block"},
        MissingRule,
        "whose reducer takes one gradient of each weight has no rule yet",
    ),
    ({"fsdp_units": "block"}, MissingRule, "use fsdp_units='block.ends'"),
    ({"dp": 4, "tp": 2}, MissingRule, "with tp=2 has no rule yet"),
    ({"dp": 4, "pp": 2, "global_batch": 8}, MissingRule, "with pp=2 has no rule yet"),
    ({"no_sync": True}, MissingRule, "with no_sync=True has no rule yet"),
    ({"offload": True}, MissingRule, "with offload=True has no rule yet"),
    ({"compile": "block"}, MissingRule, "with compile='block' has no rule yet"),
    ({"torch_version": "2.14"}, MissingRule, "with torch_version='2.14' has no rule yet"),
]


@pytest.mark.parametrize("asked, error, text", REFUSED, ids=[text for *_, text in REFUSED])
def test_what_has_no_rule_beside_it_is_refused(asked, error, text):
    with pytest.raises(error, match=text):
        estimated(SHARDED | CHUNKS, **asked)


def test_autocast_and_tied_ends_are_refused():
    with pytest.raises(MissingRule, match=r"under autocast .* has no rule yet; use precision='bf16'"):
        estimated(ALONE | CHUNKS, precision="bf16-mixed")
    with pytest.raises(MissingRule, match="whose ends are tied"):
        memplan.estimate("llama-3.2-1b", **ALONE, **CHUNKS)


def test_torchtitans_flags_say_it_and_are_read_back(tmp_path):
    file = tmp_path / "train.sh"
    file.write_text(estimated(SHARDED, **CHUNKS, optimizer_impl="foreach").export("torchtitan"))
    assert "--loss.num_chunks 4" in file.read_text()
    again = memplan.estimate(cluster="8xh100-sxm", **read(file, "torchtitan").keywords)
    assert again.plan == estimated(SHARDED, **CHUNKS, optimizer_impl="foreach").plan
