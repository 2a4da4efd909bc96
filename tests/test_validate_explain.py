"""Explanations: a case's, and a CUDA snapshot's, whose loader runs nothing."""

import json
import pickle
import pickletools
import time
from collections import Counter

import pytest
from click.testing import CliRunner
from PIL import Image

from memplan import Plan, snapshot
from memplan.device import H100
from memplan.errors import InvalidValue
from memplan.estimate import rank_estimate
from memplan.plan import Rank
from memplan.record import unrolled
from memplan.shapes import Buffer
from memplan.snapshot import plain_data, read_snapshot
from validate.__main__ import main
from validate.cases import Case
from validate.explain import explained, shortened, snapshot_comparison
from validate.suites.models import LLAMA

CASE = Case(
    name="one GPU", model=LLAMA, plan=Plan(micro_batch=8, seq_len=256, precision="bf16-mixed"), device="cuda",
    gpu="h100-sxm",
)  # fmt: skip
FRAMES = [
    {"filename": "/x/torch/nn/functional.py", "line": 7, "name": "linear"},
    {"filename": "/x/train.py", "line": 3, "name": "step"},
]


def run(*arguments):
    return CliRunner().invoke(main, ["explain", *map(str, arguments)])


def entry(action, address, n_bytes):
    return {"action": action, "addr": address, "size": n_bytes, "stream": 0, "frames": FRAMES, "time_us": 0}


def freed(address, n_bytes):
    return [entry("free_requested", address, n_bytes), entry("free_completed", address, n_bytes)]


def as_recorded(case, *, extra=0, from_the_start=False, steps=2):
    """A snapshot as CUDA's allocator would write it if it did as memplan predicts, and `extra` bytes."""
    record = rank_estimate(case.model, case.plan, Rank(), H100).record
    addresses = iter(range(0x7F0000000000, 0x7FFFFFFFFFFF, 1 << 21))
    blocks, trace, held = [], [entry("segment_alloc", 1, 1 << 30)], []
    for buffer in record.rest.elements():
        address = next(addresses)
        held.append(entry("alloc", address, buffer.n_bytes))
        blocks.append(
            {
                "address": address,
                "size": -(-buffer.n_bytes // 512) * 512,
                "requested_size": buffer.n_bytes,
                "state": "active_allocated",
                "frames": FRAMES,
            }
        )
    if extra:
        held.append(entry("alloc", address := next(addresses), extra))
        blocks.append({"address": address, "size": extra, "state": "active_allocated", "frames": FRAMES})
    for _ in range(steps):
        alive: dict[Buffer, list[int]] = {}
        for _, event in unrolled(record.step):
            if event.sign > 0:
                alive.setdefault(event.buffer, []).append(next(addresses))
                trace.append(entry("alloc", alive[event.buffer][-1], event.buffer.n_bytes))
            elif event.sign < 0:
                address = alive[event.buffer].pop()
                trace += freed(address, event.buffer.n_bytes)
        for buffer, left in alive.items():
            for address in left:
                trace += freed(address, buffer.n_bytes)
    segment = {"device": 0, "address": blocks[0]["address"], "total_size": 1 << 30, "blocks": blocks}
    return {
        "segments": [segment],
        "device_traces": [(held if from_the_start else []) + trace, []],
        "allocator_settings": {"expandable_segments": False, "garbage_collection_threshold": 0.0},
    }


def written(tmp_path, content):
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    return file


def test_a_case_is_explained_on_80_columns_in_json_and_as_a_picture(tmp_path):
    picture = tmp_path / "step.png"
    case = "gpt-small, pp2 gpipe, bf16"
    text = run(case, "--plot", picture)
    assert text.exit_code == 0, text.output
    assert max(map(len, text.output.splitlines())) <= 80
    assert "rank 1" in text.output
    for word in ("the step", "at the peak", "backward: block", "optimizer step", "exp_avg_sq", "measured"):
        assert word in text.output
    with Image.open(picture) as image:
        assert image.size[0] > 1000
    found = json.loads(run(case, "--rank", 1, "--json").output)
    assert found["title"].endswith("rank 1")
    assert found["attributed_fraction"] > 0.999
    assert found["attributed_bytes"] <= found["measured_peak_bytes"]
    assert sum(t["predicted"] * t["each_bytes"] for t in found["tensors"]) == found["predicted_peak_bytes"]
    assert max(part["measured_bytes"] for part in found["timeline"]) == found["measured_peak_bytes"]


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["lama-small, dp2 zero3"], "did you mean 'llama-small, dp2 zero3'"),
        (["llama-small, dp2", "--tp", 2], "leave out --tp, or CASE"),
        (["llama-small, dp2", "--rank", 2], "rank=2 is not allowed; use an integer from 0 to 1."),
        (["--tp", 3], "tp=3 does not divide"),
        (["--snapshot", "nowhere.pickle"], "no such file; give the path of a memory snapshot"),
    ],
)
def test_refusals_say_the_way_out(arguments, complaint):
    refused = run(*arguments)
    assert refused.exit_code == 2
    assert complaint in refused.output


@pytest.mark.parametrize("from_the_start", [False, True])
def test_a_snapshot_that_does_as_predicted_is_explained_in_full(tmp_path, from_the_start):
    file = written(tmp_path, as_recorded(CASE, from_the_start=from_the_start))
    found = snapshot_comparison(CASE, 0, file).attribution()
    assert found.fraction == 1.0
    assert found.peak_bytes == found.predicted_bytes
    assert not found.unmeasured
    kinds = Counter(tensor.kind for known in found.known for tensor in known.tensors)
    assert kinds["weights"]
    assert kinds["optimizer"]
    assert kinds["activations"]


def test_what_the_ledger_does_not_explain_of_a_snapshot_is_named(tmp_path):
    file = written(tmp_path, as_recorded(CASE, extra=123_456))
    found = snapshot_comparison(CASE, 0, file).attribution()
    assert [block.n_bytes for block in found.unexplained] == [123_456]
    assert found.unexplained[0].path == "step (train.py:3) > linear (functional.py:7)"
    options = ("--model", "llama-small", "--micro-batch", 8, "--seq-len", 256, "--precision", "bf16-mixed")
    said = run("--snapshot", file, "--plot", tmp_path / "plot.png", *options)
    assert said.exit_code == 0, said.output
    assert "measured, not in the ledger: 123,456 bytes" in said.output
    assert "linear (functional.py:7)" in said.output
    assert max(map(len, said.output.splitlines())) <= 80


def test_a_block_of_another_size_is_no_predicted_tensor(tmp_path):
    recorded = as_recorded(CASE)
    largest = max(recorded["segments"][0]["blocks"], key=lambda block: block["requested_size"])
    largest["requested_size"] += 512
    found = snapshot_comparison(CASE, 0, written(tmp_path, recorded)).attribution()
    assert [block.n_bytes for block in found.unexplained] == [largest["requested_size"]]
    assert [tensor.n_bytes for tensor in found.unmeasured] == [largest["requested_size"] - 512]


class _Hostile:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (self.file, "w")


HOSTILE = {
    "GLOBAL": b"cos\nsystem\n(S'true'\ntR.",
    "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "INST": b"(S'true'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'true'\no.",
    "EXT1": b"\x80\x02\x82\x01.",
    "PERSID": b"Pid\n.",
    "REDUCE": b"\x80\x04NN\x52.",
    "BUILD": b"\x80\x04}}b.",
    "NEWOBJ": b"\x80\x02N)\x81.",
    "BYTEARRAY8": b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "LONG4": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "BINBYTES8": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_hostile_pickle_is_refused_and_does_nothing(tmp_path, protocol):
    target = tmp_path / "written by the pickle"
    file = written(tmp_path, pickle.dumps({"segments": [_Hostile(str(target))]}, protocol))
    with pytest.raises(InvalidValue, match=r"is not read: .* makes more than plain data"):
        read_snapshot(file)
    assert not target.exists()


@pytest.mark.parametrize("opcode", HOSTILE)
def test_every_opcode_that_could_do_more_is_refused(tmp_path, opcode):
    with pytest.raises(InvalidValue, match="makes more than plain data"):
        read_snapshot(written(tmp_path, HOSTILE[opcode]))


def test_the_loader_knows_no_opcode_that_imports_or_calls():
    known = {chr(code) for code in snapshot._Reader.dispatch}
    names = {opcode.name for opcode in pickletools.opcodes if opcode.code in known}
    assert len(names) == len(known)
    able = ("GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "EXT", "PERSID", "BUFFER", "BYTE", "STRING")
    assert not [name for name in names if any(word in name for word in able) and name != "BINUNICODE"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"\x80\x04",
        pickle.dumps({"segments": []})[:-3],
        b"\x80\x04]\x94(a.",
        b"\x80\x09N.",
        b"\x80\x04h\x07.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
        b"\x80\x04X\xff\xff\xff\xffab.",
        b"\x80\x04N}NNs.",
        b"\x80\x04](K\x01K\x02u.",
    ],
)
def test_broken_files_are_refused(tmp_path, content):
    with pytest.raises(InvalidValue, match="use a file that"):
        read_snapshot(written(tmp_path, content))


@pytest.mark.parametrize(
    "data",
    [
        [],
        {"segments": []},
        {"segments": [], "device_traces": []},
        {"segments": [], "device_traces": [[]]},
        {"segments": [{"blocks": [{"state": "active_allocated"}]}], "device_traces": [[]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": "a", "size": 1}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": -1}]]},
        {"segments": [], "device_traces": [[entry("alloc", 1, 8) | {"frames": [1]}]]},
        {"segments": 1, "device_traces": {"a": 1}},
    ],
)
def test_what_is_no_snapshot_is_refused(tmp_path, data):
    with pytest.raises(InvalidValue, match=r"torch\.cuda\.memory\._record_memory_history"):
        read_snapshot(written(tmp_path, data))


def test_a_file_that_is_too_large_is_refused_unread(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "LARGEST_BYTES", 10)
    with pytest.raises(InvalidValue, match=r"is larger than 10 bytes, .*; record fewer entries"):
        read_snapshot(written(tmp_path, {"segments": [], "device_traces": [[]]}))


def shared(n):
    """A list that takes a few bytes more in a pickle for each of its 2**n elements' doublings."""
    found: list[object] = [1]
    for _ in range(n):
        found = [found, found]
    return found


def in_order(trace, blocks=(), **segment):
    return {"segments": [{"blocks": list(blocks), **segment}], "device_traces": [trace]}


ALLOC = entry("alloc", 512, 8)
BLOCK = {"state": "active_allocated", "address": 512, "size": 8}
DEEP = shared(40)


@pytest.mark.parametrize(
    "data",
    [
        in_order([ALLOC | {"addr": DEEP}]),
        in_order([ALLOC | {"size": DEEP}]),
        in_order([ALLOC | {"frames": DEEP}]),
        in_order([ALLOC | {"frames": [FRAMES[0] | {"name": DEEP}]}]),
        in_order([ALLOC | {"frames": [FRAMES[0] | {"filename": DEEP}]}]),
        in_order([ALLOC | {"frames": [FRAMES[0] | {"line": DEEP}]}]),
        in_order([ALLOC], [BLOCK | {"size": DEEP}]),
        in_order([ALLOC], [BLOCK | {"requested_size": DEEP}]),
        in_order([ALLOC], [BLOCK | {"size": DEEP}] * 60, address=DEEP),
        in_order(DEEP),
        {"segments": DEEP, "device_traces": [[ALLOC]]},
        {"segments": [], "device_traces": DEEP},
        DEEP,
    ],
)
def test_lists_that_are_shared_by_reference_are_refused_at_once(tmp_path, data):
    file = written(tmp_path, data)
    assert file.stat().st_size < 2000
    began_s = time.process_time()
    with pytest.raises(InvalidValue, match="use a file that") as refused:
        read_snapshot(file)
    assert time.process_time() - began_s < 0.5
    assert len(str(refused.value)) < 600


def test_more_blocks_and_entries_than_the_file_can_hold_are_refused(tmp_path):
    file = written(tmp_path, {"segments": [{"blocks": [BLOCK] * 1000}] * 1000, "device_traces": [[ALLOC]]})
    with pytest.raises(InvalidValue, match=r"1000001 blocks and entries, some of them by reference"):
        read_snapshot(file)
    with pytest.raises(InvalidValue, match=r"1000 blocks and entries, some of them by reference"):
        read_snapshot(written(tmp_path, in_order([ALLOC] * 1000)))


def test_frames_that_are_shared_are_made_a_text_once_and_long_names_are_cut(tmp_path):
    frames = [FRAMES[0] | {"name": "f" * 10**6}] * 50
    trace = [entry("alloc", 512 * i, 8) | {"frames": frames} for i in range(1, 100)]
    events = read_snapshot(written(tmp_path, in_order(trace))).events
    assert len({id(event.path) for event in events}) == 1
    assert len(events[0].path) < 50 * 110


@pytest.mark.parametrize("key", ["tuples", "numbers"])
def test_keys_whose_hashes_take_time_are_refused(key):
    deep: tuple[object, ...] = ()
    for _ in range(40):
        deep = (deep, deep)
    written = b"\x80\x04}" + pickle.dumps(deep if key == "tuples" else 2**200)[2:-1] + b"Ns."
    with pytest.raises(InvalidValue, match="neither a text nor a number of 64 bits"):
        plain_data(written, "data")


def test_plain_data_comes_back_as_it_was():
    data = {"a": [1, -2, 1.5, 2**40, True, None, "é", ()], "b": {"c": (1, 2, 3, 4)}, "same": [[0] * 2] * 3}
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert plain_data(pickle.dumps(data, protocol), "data") == data


def test_paths_are_shortened_from_the_outside():
    assert shortened("a > b > c", 5) == "b > c"
    assert shortened("x" * 200, 10) == "x" * 10


def test_a_verdict_is_never_rounded_up(tmp_path):
    file = written(tmp_path, as_recorded(CASE, extra=1))
    assert "99.999% of" in explained("t", snapshot_comparison(CASE, 0, file)).verdict
