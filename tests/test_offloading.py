"""Inputs of recomputed blocks on the host: what GPU, host and link then see, and what has no rule."""

from dataclasses import replace
from typing import Any, cast

import pytest

import memplan
from memplan import MissingRule, PlanRefused
from memplan.models import Decoder, preset
from memplan.offload_activations import MOST_STASHED
from memplan.record import unrolled

ALONE: dict[str, Any] = {"precision": "bf16", "optimizer": "sgd", "seq_len": 2048, "recompute": "full"}
ON_HOST: dict[str, Any] = {**ALONE, "activation_offloading": "save_on_cpu"}
MODEL = cast(Decoder, preset("qwen3-0.6b"))
INPUT_BYTES = 2048 * MODEL.d_model * 2


def estimated(asked, **others):
    return memplan.estimate(MODEL, **{**asked, **others})


def inputs_held(e):
    """The most inputs of blocks that are alive at once, as they came from the block before."""
    alive, most = 0, 0
    boundary = e.worst.record.program().handed_on
    for _, event in unrolled(e.worst.record.step):
        if event.buffer in boundary:
            alive += event.sign
            most = max(most, alive)
    return most


def test_the_gpu_holds_two_inputs_at_most_and_the_host_all_of_them():
    e = estimated(ON_HOST, cluster="1xh100-sxm")
    assert inputs_held(e) <= 3 < MODEL.n_blocks < inputs_held(estimated(ALONE))
    assert e.worst.host_pinned_bytes == e.host.activations_bytes == MODEL.n_blocks * INPUT_BYTES
    assert any("host holds" in note for note in e.notes)


def test_page_locked_blocks_are_powers_of_two():
    e = estimated(ON_HOST, seq_len=1500)
    named = {buffer.name: (buffer.n_bytes, n) for buffer, n in e.worst.host_alive.items()}
    n_bytes = 1500 * MODEL.d_model * 2
    inputs = "blocks.*.activations to the host"
    rest = f"{inputs} (rest of its page-locked block)"
    assert named == {inputs: (n_bytes, 28), rest: (2**22 - n_bytes, 28)}


def test_blocks_that_are_not_recomputed_keep_all_they_save_on_the_gpu():
    assert estimated(ON_HOST, recompute_blocks=5).host.total_bytes == 5 * INPUT_BYTES


def test_copies_there_and_back_take_the_time_of_the_link():
    there, without = (estimated(asked, cluster="1xh100-sxm") for asked in (ON_HOST, ALONE))
    copied = [c for c in there.collectives if c.axis == "host"]
    assert [c.payload_bytes for c in copied] == [MODEL.n_blocks * INPUT_BYTES] * 2
    assert there.time.host_s == pytest.approx(2 * MODEL.n_blocks * INPUT_BYTES / 52.8e9, rel=1e-6)
    assert there.step_s == pytest.approx(without.step_s + there.time.host_s, rel=1e-9)


def test_there_is_no_time_where_the_link_to_the_host_is_not_known():
    e = estimated(ON_HOST, cluster="1xmi300x")
    assert e.step_s is None
    assert "between mi300x and its host" in e.time_missing[0]


def test_on_cpu_ranks_the_copy_is_on_the_device():
    e = estimated(ON_HOST, device="cpu")
    assert e.host.total_bytes == 0
    assert any(buffer.name.endswith("argument on the host") for buffer in e.worst.alive)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"recompute": "none"}, "would copy weights too, has no rule yet; use recompute='full'"),
    ({"tp": 2}, "activation_offloading='save_on_cpu' with tp=2 has no rule yet; use tp=1, or"),
    ({"pp": 2}, "with pp=2 has no rule yet; use pp=1"),
    ({"lora_rank": 8}, "with lora_rank=8 has no rule yet; use all weights"),
    ({"compile": "block"}, "with compile='block' has no rule yet; use compile='none'"),
    ({"float8": "tensorwise"}, "with float8='tensorwise' has no rule yet; use float8='none'"),
]


@pytest.mark.parametrize("asked, text", REFUSED, ids=[text for _, text in REFUSED])
def test_what_has_no_rule_beside_it_is_refused(asked, text):
    with pytest.raises(MissingRule, match=text):
        memplan.estimate("llama-3.2-1b", **{**ON_HOST, **asked})


def test_files_name_no_activations_on_the_host():
    with pytest.raises(PlanRefused, match="activation_offloading='save_on_cpu': "):
        estimated(ON_HOST).export("torchrun")


# TRL's OffloadActivations.

BY_TRL: dict[str, Any] = {**ALONE, "activation_offloading": "OffloadActivations"}
TAGS = "from the host"


def test_the_gpu_keeps_the_last_five_tensors_and_the_embeddings():
    assert MOST_STASHED + 1 <= inputs_held(estimated(BY_TRL)) <= MOST_STASHED + 3


def test_log_probabilities_go_to_the_host_and_come_back():
    held = {buffer.name: buffer.n_bytes for buffer in estimated(BY_TRL).worst.host_alive}
    assert 2048 * MODEL.vocab_size * 4 in held.values()
    allocated = [e.buffer for _, e in unrolled(estimated(BY_TRL).worst.record.step) if e.sign > 0]
    back = [one for one in allocated if one.name.endswith(TAGS)]
    assert sum(one.n_bytes == INPUT_BYTES for one in back) == MODEL.n_blocks + 1  # and the last norm's output
    assert max(one.n_bytes for one in back) == 2048 * MODEL.vocab_size * 4


def test_copies_beside_the_computation_cost_less_than_their_own_time():
    e, without = (estimated(asked, cluster="1xh100-sxm") for asked in (BY_TRL, ALONE))
    copied = sum(c.payload_bytes for c in e.collectives if c.axis == "host") / 52.8e9
    assert 0 < e.time.host_s < copied
    assert without.step_s + e.time.host_s < e.step_s < without.step_s + copied  # the targets are copied too


NOT_BY_TRL: list[tuple[dict[str, Any], str]] = [
    (
        {"implementation": "reference"},
        "with memplan's own modules .* has no rule yet; use implementation=",
    ),
    ({"recompute": "selective"}, "with recompute='selective' has no rule yet; use recompute='full'"),
    ({"recompute_blocks": 3}, "with recompute_blocks=3 has no rule yet; use all blocks"),
    ({"fsdp_version": 1, "zero": 3, "dp": 2}, "with fsdp_version=1 has no rule yet; use fsdp_version=2"),
]


@pytest.mark.parametrize("asked, text", NOT_BY_TRL, ids=[text for _, text in NOT_BY_TRL])
def test_what_has_no_rule_beside_trls_is_refused(asked, text):
    with pytest.raises(MissingRule, match=text):
        memplan.estimate("llama-3.2-1b", **{"implementation": "huggingface", **BY_TRL, **asked})


def test_models_of_few_blocks_are_refused():
    with pytest.raises(MissingRule, match="with 4 blocks has no rule yet; use more than 5 blocks"):
        memplan.estimate(replace(MODEL, n_layers=4), **BY_TRL)
