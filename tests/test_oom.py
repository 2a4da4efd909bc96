"""What was alive when memory ran out: beside PyTorch's own message, by where it was allocated, from any file.

The snapshots were dumped by PyTorch 2.13.0's CUDA software on a GPU that is not there: an embedding of 32,000
x 1,024, four MLP blocks and a head under AdamW and bfloat16 autocast, limited to 4 % of an H100.
"""

import json
import lzma
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import memplan
from memplan import oom
from memplan.cli import commands
from memplan.errors import InvalidValue
from memplan.units import human_bytes

SNAPSHOTS = Path(__file__).parent / "snapshots"

SAID = {
    "went-on": ("500.00 MiB", "2.75 GiB", "426.65 MiB", "75.95 GiB"),
    "first-step": ("2.44 GiB", "2.88 GiB", "118.39 MiB", "76.11 GiB"),
    "expandable": ("500.00 MiB", "2.74 GiB", "34.65 MiB", "76.33 GiB"),
}
"""Of each PyTorch's own message: "Tried to allocate ..., ... is allocated by PyTorch, and ... is reserved by
PyTorch but unallocated", "... is free". All were dumped after the exception had freed its tensors, one after
`torch.cuda.empty_cache()` and another step."""


@pytest.fixture
def snapshot(tmp_path):
    def made(content):
        file = tmp_path / "snapshot.pickle"
        if isinstance(content, str):
            content = lzma.decompress((SNAPSHOTS / f"{content}.pickle.xz").read_bytes())
        file.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
        return file

    return made


def frames(*calls):
    return [{"name": name, "filename": file, "line": line} for name, file, line in calls]


STEP = ("step", "/home/me/train.py", 9)
MODULE = "/x/site-packages/torch/nn/modules/module.py"
FORWARD = frames(("forward", "/home/me/model.py", 7), ("_call_impl", MODULE, 1), STEP)


def entry(action, address, n_bytes, stack=FORWARD, **more):
    return {"action": action, "addr": address, "size": n_bytes, "stream": 0, "frames": stack} | more


def block(address, size, stack=FORWARD, state="active_allocated"):
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": stack}


def segment(address, *blocks):
    return {
        "device": 0,
        "address": address,
        "total_size": sum(b["size"] for b in blocks),
        "blocks": [*blocks],
    }


def failed(n_bytes, free=0):
    return {"action": "oom", "size": n_bytes, "device_free": free, "stream": 0, "frames": FORWARD}


@pytest.mark.parametrize("name", SAID)
def test_figures_are_those_of_pytorchs_own_message(snapshot, name):
    found = memplan.explain_oom(snapshot(name))
    figures = found.asked_bytes, found.allocated_bytes, found.free_bytes, found.device_free_bytes
    assert tuple(map(human_bytes, figures)) == SAID[name]
    assert not found.is_fragmented
    assert found.expandable is (name == "expandable")


def test_what_was_alive_is_said_by_the_users_own_lines_largest_first(snapshot):
    found = memplan.explain_oom(snapshot("went-on"))
    n_parameters = 32000 * 1024 + 4 * (2 * 4 * 1024**2 + 5 * 1024 + 2 * 1024) + 32000 * 1024 + 32000
    whats = found.by_what
    assert [*whats][:4] == ["forward", "optimizer", "backward", "weights"]
    assert 4 * n_parameters <= whats["weights"] < 1.01 * 4 * n_parameters
    assert 8 * n_parameters <= whats["optimizer"] < 1.01 * 8 * n_parameters
    assert found.n_steps == 3
    assert found.asked_in == "the backward pass"
    sizes = [each.n_bytes for each in found.held]
    assert sizes == sorted(sizes, reverse=True)
    logits = next(each for each in found.held if each.where.endswith("> functional.cross_entropy"))
    assert (logits.what, logits.n_bytes) == ("forward", 500 * 2**20 + 512)
    assert logits.where.startswith("train.py:35 step")


@pytest.mark.parametrize("name", SAID)
def test_the_command_prints_the_verdict_first_and_what_to_do_last(snapshot, name):
    result = CliRunner().invoke(commands, ["explain-oom", str(snapshot(name))])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].startswith(f"OUT OF MEMORY: {SAID[name][0]} more were asked for in ")
    assert max(map(len, lines)) <= 80
    advice = " ".join(result.output.partition("What to do\n")[2].split())
    assert "set_per_process_memory_fraction" in advice
    assert "No setting of the allocator would have helped" in advice
    assert "--recompute full" in advice
    printed = json.loads(CliRunner().invoke(commands, ["explain-oom", str(snapshot(name)), "--json"]).output)
    assert printed == json.loads(json.dumps(memplan.explain_oom(snapshot(name)).to_dict()))


def test_it_needs_neither_torch_nor_unpickling(snapshot):
    code = "import sys; sys.modules['torch'] = None; from memplan.cli import main; main()"
    command = [sys.executable, "-c", code, "explain-oom", str(snapshot("first-step"))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("OUT OF MEMORY: 2.44 GiB more were asked for in train.py:35 step.")


def test_pieces_that_are_too_small_are_named_fragmentation(snapshot):
    pieces = [block(2**20 * i, 2**19, state="inactive" if i % 2 else "active_allocated") for i in range(8)]
    for i, piece in enumerate(pieces):
        piece["address"] = 2**19 * i
    whole = {"segments": [segment(0, *pieces)], "device_traces": [[entry("alloc", 0, 2**19), failed(2**20)]]}
    found = memplan.explain_oom(snapshot(whole))
    assert (found.free_bytes, found.largest_free_bytes, found.is_fragmented) == (2**21, 2**19, True)
    assert "expandable_segments:True" in str(found)
    whole["device_traces"][0][-1] = failed(2**22)
    assert "No setting of the allocator would have helped" in str(memplan.explain_oom(snapshot(whole)))


def test_what_came_after_the_failure_is_undone(snapshot):
    trace = [
        *(entry("segment_alloc", 0, 4096), entry("alloc", 0, 1000), entry("alloc", 1024, 2000)),
        failed(8192),
        *(entry("free_requested", 0, 1000), entry("free_completed", 0, 1000)),
        *(entry("segment_alloc", 8192, 4096), entry("alloc", 8192, 4096), entry("alloc", 0, 512)),
    ]
    left = [block(0, 512), block(512, 512, state="inactive"), block(1024, 2048)]
    left.append(block(3072, 1024, state="inactive"))
    data = {"segments": [segment(0, *left), segment(8192, block(8192, 4096))], "device_traces": [trace]}
    found = memplan.explain_oom(snapshot(data))
    assert (found.reserved_bytes, found.allocated_bytes, found.free_bytes) == (4096, 1024 + 2048, 1024)
    data["device_traces"] = [[each for each in trace if each["action"] != "oom"]]
    most = memplan.explain_oom(snapshot(data))
    assert (most.asked_bytes, most.allocated_bytes) == (None, 512 + 2048 + 4096)
    assert str(most).startswith("NO ALLOCATION FAILED in this trace. Most was allocated:\n")


STACKS = {
    "weights": frames(("<lambda>", MODULE, 5), ("_apply", MODULE, 4), ("cuda", MODULE, 3), STEP),
    "optimizer": frames(("_init_group", "/x/site-packages/torch/optim/adam.py", 5), STEP),
    "gathered": frames(
        ("all_gather_inputs", "/x/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_param.py", 5),
        ("_call_impl", MODULE, 1),
        STEP,
    ),
    "recomputed": frames(
        ("forward", "/home/me/model.py", 7),
        ("recompute_fn", "/x/site-packages/torch/utils/checkpoint.py", 5),
    ),
    "backward": frames(("torch::autograd::Engine::thread_main", "??", 0)),
    "forward": frames(
        ("forward", "/home/me/model.py", 7),
        ("_call_impl", MODULE, 1),
        ("forward", "/x/site-packages/torch/distributed/fsdp/fully_sharded_data_parallel.py", 5),
        STEP,
    ),
    "other": frames(STEP),
}


@pytest.mark.parametrize("what", STACKS)
def test_blocks_are_named_by_their_stacks(snapshot, what):
    trace = [entry("alloc", 0, 1024, FORWARD), entry("alloc", 1024, 2048, STACKS[what]), failed(4096)]
    blocks = block(0, 1024, FORWARD), block(1024, 2048, STACKS[what])
    data = {"segments": [segment(0, *blocks)], "device_traces": [trace]}
    found = memplan.explain_oom(snapshot(data))
    assert found.held[0].what == what
    assert found.by_what[what] == 2048 + (1024 if what == "forward" else 0)
    assert oom.ADVICE[what] in [*found.to_dict()["advice"]]


def test_blocks_of_before_the_recording_and_of_no_recording_are_said_to_be(snapshot):
    blocks = block(0, 1024, []), block(1024, 512, FORWARD)
    trace = [entry("alloc", 1024, 512), failed(4096)]
    found = memplan.explain_oom(snapshot({"segments": [segment(0, *blocks)], "device_traces": [trace]}))
    assert found.by_what == {"before": 1024, "forward": 512}
    bare = [entry("alloc", 1024, 512, []), failed(4096) | {"frames": []}]
    data = {"segments": [segment(0, blocks[0], block(1024, 512, []))], "device_traces": [bare]}
    found = memplan.explain_oom(snapshot(data))
    assert found.by_what == {"unknown": 1536}
    assert "_record_memory_history() before the model is made" in " ".join(str(found).split())


def test_names_in_the_file_cannot_move_the_cursor(snapshot):
    stack = frames(("\x1b[2J", "/home/me/\x1b[0;0Hmodel.py", 7), ("_call_impl", MODULE, 1))
    data = {"segments": [segment(0, block(0, 512, stack))], "device_traces": [[failed(4096)]]}
    text = str(memplan.explain_oom(snapshot(data)))
    assert "\x1b" not in text


@pytest.mark.parametrize(
    "data",
    [
        [],
        {"segments": []},
        {"segments": 1, "device_traces": [[]]},
        {"segments": [{"address": 0, "total_size": 1, "blocks": [{}]}], "device_traces": [[]]},
        {"segments": [], "device_traces": [[{"action": "oom"}]]},
        {"segments": [], "device_traces": [[{"action": "oom", "size": -1, "device_free": 0}]]},
        {"segments": [segment(0, block(0, 512, [1]))], "device_traces": [[failed(1)]]},
        {"segments": [segment(0, block(0, 512, frames((1, "a.py", 1))))], "device_traces": [[failed(1)]]},
        {"segments": [segment(0, block(0, 512, frames(("a", "a.py", "x"))))], "device_traces": [[failed(1)]]},
        {"segments": [], "device_traces": [[entry("alloc", [], 1), failed(1)]]},
    ],
)
def test_what_is_no_snapshot_is_refused_in_one_sentence(snapshot, data):
    with pytest.raises(InvalidValue, match=r"torch\.cuda\.memory\._record_memory_history"):
        memplan.explain_oom(snapshot(data))


def test_lists_shared_by_reference_are_counted_before_they_are_read(snapshot):
    shared = [block(0, 512)] * 1000
    data = {"segments": [segment(0, block(0, 512)) | {"blocks": shared}] * 1000, "device_traces": [[]]}
    with pytest.raises(InvalidValue, match="1000000 blocks and entries, some of them by reference"):
        memplan.explain_oom(snapshot(data))
