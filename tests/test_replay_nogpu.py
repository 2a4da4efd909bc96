"""Runs of PyTorch's CUDA build without a GPU, predicted afresh: what tensors asked for, allocated, reserved.

The measurements are the files of `data/measurements/nogpu` (see data/README.md): real CUDA software and its
real caching allocator, on a GPU that is not there. Nothing predicted is read from them, and nothing is run.
"""

import copy
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from memplan.allocator import OutOfMemory
from memplan.engines.options import plan_dict
from memplan.errors import InvalidValue
from memplan.hardware import gpu
from memplan.tracing import cache
from memplan.units import GiB
from tests.replayed import EXPECTED
from validate.adapted import on_file
from validate.allocated import FIGURES, allocator_errors, allowed_bytes, twins_summary
from validate.cases import Case
from validate.gpus import Gpus
from validate.predict import estimated_rank, prediction
from validate.records import Record, merged, read_records
from validate.requests import n_equal, read_requests
from validate.suites.both import gpu_both, twin

FOLDER = Path(__file__).parents[1] / "data" / "measurements" / "nogpu"
H100 = Gpus(
    n=1, name="NVIDIA H100 80GB HBM3", memory_bytes=79 * GiB, capability="9.0", multiprocessors=132,
    driver="580", cuda="13.0", cudnn=91_000, nccl="2.28.9", known_as="h100-sxm",
)  # fmt: skip
FILES = {file.stem: merged(read_records(file)) for file in sorted(FOLDER.glob("*.jsonl"))}
"""Of several records of a case the last: GRPOTrainer with LoRA ran at first without merges of adapters."""

LIMITED = {name: records for name, records in FILES.items() if name.endswith(("frontier", "allocator"))}


@pytest.fixture(autouse=True)
def traces_on_file(monkeypatch):
    """Nothing is traced: what records need is on file."""

    def missing(asked):
        raise AssertionError(f"no trace of {asked.name} is on file; python -m validate.adapted writes it")

    monkeypatch.setattr(cache, "_traced", partial(on_file, traced=missing))


@pytest.mark.parametrize("name", FILES)
def test_bytes_are_what_pytorch_s_cuda_stack_and_allocator_say(name):
    n_ranks, equal, worst = EXPECTED[name]
    errors = list(allocator_errors(FILES[name]))
    assert len(errors) == n_ranks
    for figure, n_right, most in zip(FIGURES, equal, worst, strict=True):
        off = sorted((abs(getattr(each, figure)), each.name) for each in errors)
        assert sum(error == 0 for error, _ in off) == n_right, (figure, off[-5:])
        assert off[-1][0] <= most, (figure, off[-5:])


@pytest.mark.parametrize("name", FILES)
def test_states_and_collectives_are_exact(name):
    for record in FILES[name]:
        case = Case.from_dict(record.case)
        for rank in ranks_of(record):
            said = prediction(case, rank["rank"])
            states = [getattr(said, f"{kind}_bytes") for kind in ("weights", "grads", "optimizer")]
            assert states == [rank[f"{kind}_bytes"] for kind in ("weights", "grads", "optimizer")], case.name
            sent = Counter((c.kind, c.axis, c.calls, c.payload_bytes) for c in said.collectives)
            assert sent == Counter(tuple(c.values()) for c in rank["collectives"]), case.name


@pytest.mark.parametrize("name", FILES)
def test_records_are_predicted_by_the_rules_of_the_pytorch_that_ran(name):
    for record in FILES[name]:
        asked = record.case["plan"].get("torch_version", "2.13")  # DeepSpeed's engine knows one release
        assert record.environment["torch"].startswith(f"{asked}.")


@pytest.mark.parametrize("name", LIMITED)
def test_what_ran_out_of_memory_is_what_the_replay_says(name):
    """Frontiers are the largest that ran and the smallest that did not, along three axes, within a limit.

    Those that ran are replayed within it where their bytes are compared, which raises for what does not fit.
    """
    failed = [record for record in LIMITED[name] if record.outcome != "ok"]
    assert failed
    assert not [record.case["name"] for record in failed if runs(record)]


WILD = [record for name in FILES if name.endswith(("wild", "divided", "deepspeed")) for record in FILES[name]]
OUT_OF_MEMORY = [record for record in WILD if record.outcome != "ok"]


@pytest.mark.parametrize("record", OUT_OF_MEMORY, ids=lambda record: record.case["name"])
def test_models_at_true_size_that_ran_out_of_memory_do_not_fit(record):
    assert not runs(record)


def runs(record: Record) -> bool:
    case = Case.from_dict(record.case)
    try:
        estimated_rank(case, case.ranks[0]).replay(
            plan_dict(case.plan)["alloc_conf"], allowed_bytes=allowed_bytes(case)
        )
    except OutOfMemory:
        return False
    return True


@pytest.mark.parametrize("name", FILES)
def test_every_record_says_that_no_gpu_was_there(name):
    for record in FILES[name]:
        assert record.outcome == "ok" or name in LIMITED or record in OUT_OF_MEMORY, record.case["name"]
        assert record.case["device"] == "nogpu"
        assert gpu(record.case["gpu"]).device.type == "cuda"
        assert "no GPU" in record.environment["meaning"]
        assert not any(rank["step_s"] for rank in ranks_of(record))


def ranks_of(record: Record):
    return record.measured["ranks"] if record.measured else []


@pytest.mark.parametrize("file", sorted((FOLDER / "requests").glob("*.jsonl")), ids=lambda file: file.stem)
def test_random_requests_are_served_as_pytorch_s_allocator_serves_them(file):
    """Bytes allocated, reserved and given back after each of 100 random programs' requests, 21 settings."""
    records = read_requests(file)
    assert len(records) == 21
    for record in records:
        assert n_equal(record) == len(record["said"]) == 100, record["alloc_conf"]


def test_bytes_with_and_without_a_gpu_are_set_side_by_side():
    """No GPU has run `gpu-both` yet: a record without one stands for its twin, and one byte more is told."""
    case = gpu_both(H100, ())[0]
    record = FILES["h100-single"][0]
    measured = copy.deepcopy(record.measured)
    on_gpu = replace(record, case={**record.case, "name": case.name, "device": "cuda"})
    without = replace(record, case={**record.case, "name": twin(case).name}, measured=measured)
    assert all("equal in 1 of 1 ranks" in line for line in twins_summary([on_gpu, without]))
    measured["ranks"][0]["peak_bytes"] += 1
    assert "equal in 0 of 1 ranks" in twins_summary([on_gpu, without])[0]
    assert twins_summary([on_gpu]) == []


@pytest.mark.parametrize("gpus", [None, replace(H100, device="nogpu")])
def test_both_needs_a_gpu(gpus):
    with pytest.raises(InvalidValue, match="sees no GPU here"):
        gpu_both(gpus, ())


def test_what_deepspeed_holds_before_the_first_step_is_what_was_measured():
    """Under ZeRO-0 to 2, whose set-up flattens the weights."""
    n_seen = 0
    for record in FILES["h100-deepspeed"]:
        case = Case.from_dict(record.case)
        for measured in ranks_of(record):
            first = measured["allocator"][0]
            if first["step"] == 0 and case.plan.zero < 3:
                replay = estimated_rank(case, measured["rank"]).replayed
                assert replay is not None
                assert replay.setup == (first["allocated_bytes"], first["reserved_bytes"]), case.name
                n_seen += 1
    assert n_seen == 90
