"""The GPU suites: what they ask, their smallest form on CPU, and GPU code with CUDA's functions replaced."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from memplan import Llama, Plan
from memplan.engines.checks import check_plan
from memplan.engines.options import plan_of
from memplan.errors import InvalidValue, PlanRefused
from memplan.precisions import PRECISIONS
from memplan.units import GiB, MiB
from validate import environment, gpus, launch
from validate.__main__ import main
from validate.calibrate import read_timings
from validate.cases import GPU_STEPS, Case, check_case, placed
from validate.forkserver import SETTINGS
from validate.gpus import Gpus
from validate.judge import References, judged
from validate.launch import PRELOADED, device_for, run_case, take_gpu
from validate.machine import Budget
from validate.measure import GpuWatch
from validate.predict import estimated_rank
from validate.records import Outcome, Record
from validate.standin import NCCL_ID_BYTES, StoreOfOne
from validate.suites import suite
from validate.suites.frontier import Question, frontier
from validate.suites.gpu import GPU_SUITES, USABLE
from validate.sweep import share_of
from validate.systems import prepared

ROOT = Path(__file__).parents[1]
H100 = Gpus(
    n=1, name="NVIDIA H100 80GB HBM3", memory_bytes=79 * GiB, capability="9.0", multiprocessors=132,
    driver="580", cuda="13.0", cudnn=91_000, nccl="2.28.9", known_as="h100-sxm",
)  # fmt: skip
TINY = Llama(name="tiny", n_layers=2, d_model=32, n_heads=2, d_ff=64, vocab_size=128, max_seq_len=32)


def tiny(**plan):
    return Case(name="tiny", model=TINY, plan=plan_of(seq_len=16, precision="fp32", **plan))


def on_gpu(**plan):
    return replace(tiny(**plan), device="cuda", gpu="h100-sxm", backend="nccl", steps=GPU_STEPS)


# What the suites ask.

OF_TRUE_SIZE = (
    *("gpu-optimizers", "gpu-compiled", "gpu-float8"),
    *("gpu-offloading", "gpu-losses", "gpu-no-sync", "gpu-trainers", "gpu-trl"),
    *("gpu-fairscale", "gpu-colossalai", "gpu-torchtitan"),
)
"""The suites without cases for CPU ranks."""


@pytest.mark.parametrize("name", GPU_SUITES)
@pytest.mark.parametrize("found", [None, H100, replace(H100, n=8)], ids=["cpu", "one", "eight"])
def test_every_case_can_run_and_has_its_own_name(name, found):
    if name == "gpu-nccl" and found == H100:
        with pytest.raises(InvalidValue, match="use gpu-shared"):
            suite(name, found)
        return
    if found is None and name in OF_TRUE_SIZE:
        with pytest.raises(InvalidValue, match="use --device nogpu"):
            suite(name, found)
        return
    if name == "gpu-wild" and found is not None and find_spec("transformers") is None:
        with pytest.raises(InvalidValue, match=r"memplan\[huggingface\]"):
            suite(name, found)
        return
    cases = suite(name, found)
    assert max(Counter(case.name for case in cases).values()) == 1
    for case in cases:
        check_plan(case.model, case.plan)
        check_case(case)
        assert case.device == ("cpu" if found is None else "cuda")
        assert set(case.ranks) <= set(range(case.plan.world_size))


def test_a_single_gpu_is_asked_for_both_families_every_precision_and_512_to_32k_tokens():
    cases = suite("gpu-single", H100)
    assert {case.plan.precision for case in cases} == set(PRECISIONS.own)
    assert {type(case.model).__name__ for case in cases} == {"Llama", "Gpt"}
    assert {512, 4096, 16_384, 32_768} <= {case.plan.seq_len for case in cases}
    assert all(case.plan.world_size == 1 for case in cases)
    for case in cases:
        assert estimated_rank(case, 0).peak_bytes <= USABLE * H100.memory_bytes


def test_stand_ins_are_ranks_of_8_to_1024_and_fit_one_gpu_with_as_many_layers_as_can():
    cases = suite("gpu-standin", H100)
    sizes = {case.plan.world_size for case in cases}
    assert (min(sizes), max(sizes)) == (8, 1024)
    for case in cases:
        assert estimated_rank(case, *case.ranks).peak_bytes <= USABLE * H100.memory_bytes
    assert any(case.model.name == "llama-3.1-405b" and case.model.n_layers == 126 for case in cases)


def test_shared_gpus_run_no_pipeline_since_gloo_cannot_send_from_a_gpu():
    assert all(case.backend == "gloo" for case in suite("gpu-shared", H100))
    with pytest.raises(PlanRefused, match="gloo sends no tensor of a GPU; use"):
        check_case(replace(on_gpu(pp=2), backend="gloo"))


def test_ranks_get_a_gpu_each_where_there_are_enough():
    two = replace(H100, n=2)
    assert placed(tiny(dp=2), two) == on_gpu(dp=2)
    assert placed(tiny(dp=4), two).backend == "gloo"
    assert placed(replace(on_gpu(), steps=tiny().steps), None) == tiny()


# One rank of many.


def test_a_stand_in_for_1024_ranks_holds_and_sends_what_is_predicted():
    plan = Plan(
        dp=64, tp=2, dp_replicate=8, zero=3, sequence_parallel=True, seq_len=16, precision="bf16-mixed"
    )
    case = Case(name="x", model=replace(TINY, n_kv_heads=2), plan=plan, backend="fake", rank=777)
    record = judged(case, References())
    assert record.outcome == "ok", record.reason
    assert record.confirmed
    assert [rank["rank"] for rank in record.measured["ranks"]] == [777]
    assert record.measured["losses"] == []
    assert record.unchecked.startswith("not checked at all")
    assert record.loss_error is None


@pytest.mark.parametrize("options", [{"dp": 8}, {"dp": 8, "zero": 1}, {"pp": 4, "dp": 2}], ids=str)
def test_a_stand_in_under_ddp_and_in_a_pipeline_is_confirmed(options):
    case = replace(tiny(**options), model=replace(TINY, n_layers=4), backend="fake", rank=5)
    record = judged(case, References())
    assert record.outcome == "ok", record.reason
    assert (record.states_off_bytes, record.collectives_off) == (0, 0)
    assert abs(record.peak_error) < 0.001


def test_a_rank_runs_alone_over_what_needs_no_others():
    with_others = on_gpu(dp=2)
    check_case(replace(with_others, device="nogpu", rank=1))
    fake, on_cpu = replace(with_others, backend="fake"), replace(tiny(dp=2), rank=0)
    for wrong in (fake, on_cpu, replace(with_others, rank=0)):
        with pytest.raises(InvalidValue, match="one rank alone runs over backend 'fake', or 'nccl' on nogpu"):
            check_case(wrong)


def test_stand_ins_without_a_gpu_are_ranks_of_nccl_s_own_process_group():
    cases = suite("gpu-standin", replace(H100, device="nogpu"))
    assert {case.backend for case in cases} == {"nccl"}
    assert {case.backend for case in suite("gpu-standin", H100)} == {"fake"}
    assert all(len(case.ranks) == 1 < case.plan.world_size for case in cases)


def test_the_store_of_a_rank_alone_answers_for_all_others():
    store = StoreOfOne()
    prefixed = torch.distributed.PrefixStore("default", store)
    prefixed.set("key", "value")
    assert prefixed.get("another's") == bytes(NCCL_ID_BYTES)
    assert prefixed.check(["exception_dump"]) is False
    assert store.clone() is store


# CUDA's functions replaced: what is asked of it, and in which order.


class Cuda:
    """Stands for `torch.cuda`: notes what is called."""

    def __init__(self, monkeypatch):
        self.called = []
        answers = {
            "is_initialized": True, "synchronize": None, "reset_peak_memory_stats": None,
            "memory_allocated": 100, "max_memory_allocated": 300, "max_memory_reserved": 400,
            "memory_stats": {"requested_bytes.all.peak": 290, "segment.all.current": 7},
            "mem_get_info": (600, 1000), "empty_cache": None,
            "set_device": None, "set_per_process_memory_fraction": None, "_is_in_bad_fork": False,
            "get_device_properties": SimpleNamespace(total_memory=1000),
        }  # fmt: skip
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, self._noting(name, answer))
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self._noting("record", None))
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", self._noting("dump", None))

    def _noting(self, name, answer):
        def noted(*args, **kwargs):
            self.called.append((name, *args, *kwargs.items()))
            return answer

        return noted


def test_a_gpu_is_asked_for_its_peaks_after_the_step_and_they_are_reset_before(monkeypatch, tmp_path):
    training = prepared(tiny(), 0, torch.device("cpu"))
    training.step()
    cuda = Cuda(monkeypatch)
    watch = GpuWatch(frozenset({1, 2}), tmp_path / "x.pickle")
    watch.watch(training)
    training.step()
    start = len(cuda.called)
    losses, seen = watch.observed(training)
    states, memory = seen()
    assert len(losses) == 1
    assert states.optimizer_bytes == 2 * states.weights_bytes + 4 * 21
    assert (memory.rest_bytes, memory.peak_bytes, memory.peak_reserved_bytes) == (100, 290, 400)
    assert (memory.peak_allocated_bytes, memory.device_bytes, memory.context_bytes) == (300, 400, 400)
    known = [(peaks.step, peaks.allocated_bytes, peaks.n_segments) for peaks in memory.allocator]
    assert known == [(0, 300, 7), (1, 300, 7), (2, 300, 7)]  # 0 is the set-up
    names = [call[0] for call in cuda.called[start:]]
    order = ["reset_peak_memory_stats", "record", "dump", "memory_stats"]
    assert [name for name in names[names.index(order[0]) :] if name in order[:3]] == [*order[:3], "record"]
    assert names.index("synchronize") < names.index("reset_peak_memory_stats")
    assert ("dump", str(tmp_path / "x.pickle")) in cuda.called


def test_a_rank_takes_one_gpu_and_no_more_of_it_than_its_limit(monkeypatch):
    cuda = Cuda(monkeypatch)
    take_gpu(torch.device("cuda:1"), replace(tiny(), limit_bytes=250))
    assert ("set_device", torch.device("cuda:1")) in cuda.called
    assert ("set_per_process_memory_fraction", 0.25, torch.device("cuda:1")) in cuda.called
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(RuntimeError, match="does not survive a fork"):
        take_gpu(torch.device("cuda:0"), tiny())


def test_ranks_take_turns_on_the_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [device_for(on_gpu(dp=3), rank) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert device_for(tiny(dp=3), 2) == "cpu"


TRAP = """
import sys, torch
def trapped(*_, **__):
    raise SystemExit("CUDA was used")
torch.cuda._device_count_nvml = lambda: 1
for owner, name in (torch.cuda, "_lazy_init"), (torch._C, "_cuda_init"), (torch._C, "_cuda_getDeviceCount"):
    if hasattr(owner, name):
        setattr(owner, name, trapped)
import importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
print("untouched")
"""


def test_what_the_fork_server_imports_does_not_use_cuda():
    done = subprocess.run(
        [sys.executable, "-c", TRAP, *PRELOADED],
        env=os.environ | SETTINGS,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.stdout.strip() == "untouched", done.stderr


@pytest.mark.parametrize(
    "said",
    ["CUDA out of memory. Tried to allocate", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory"],
)
def test_memory_that_cuda_does_not_have_is_an_outcome(said):
    assert launch._failure(0, RuntimeError(said)).outcome == "out-of-memory"
    assert launch._failure(0, torch.OutOfMemoryError("x")).outcome == "out-of-memory"
    assert launch._failure(0, RuntimeError("an illegal memory access")).outcome == "crashed"


def test_a_peak_beyond_the_limit_is_out_of_memory_on_cpu_too():
    assert run_case(replace(tiny(), limit_bytes=MiB)).outcome == "ok"
    ended = run_case(replace(tiny(), limit_bytes=50_000))
    assert ended.outcome == "out-of-memory"
    assert "beyond the limit of 50,000 bytes" in ended.reason


def test_nothing_runs_beside_a_case_on_a_gpu():
    budget = Budget(cores=16, memory_bytes=64 * GiB)
    assert share_of(on_gpu(), budget) == Budget(cores=16, memory_bytes=0)


def test_a_single_rank_on_a_gpu_is_only_asked_whether_its_loss_falls():
    assert on_gpu().unchecked.startswith("only that the loss falls")
    assert not on_gpu(dp=2).unchecked
    assert not tiny().unchecked


def test_the_environment_names_the_gpu_and_what_drives_it(monkeypatch):
    monkeypatch.setattr(environment, "gpus_here", lambda: H100)
    around = environment.environment(on_gpu())
    assert (around["device"], around["backend"]) == (H100.name, "nccl")
    assert around["gpu"]["driver"] == "580"
    assert environment.environment(tiny())["device"] == "cpu"
    assert "gpu" not in environment.environment(tiny())


def test_gpus_are_asked_for_in_another_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    said = json.dumps({name: getattr(H100, name) for name in H100.__slots__})
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=f"a warning\n{said}\n", returncode=0)
    )
    gpus.gpus_here.cache_clear()
    assert gpus.gpus_here() == H100
    gpus.gpus_here.cache_clear()


def test_an_asked_for_gpu_that_is_not_there_is_refused():
    done = CliRunner().invoke(main, ["run", "--device", "cuda"])
    assert done.exit_code == 2
    assert "PyTorch sees no GPU here" in done.output


# The largest micro-batch.


def tried(question, micro_batch, largest):
    outcome: Outcome = "ok" if micro_batch <= largest else "out-of-memory"
    return Record(case=question.case(micro_batch).to_dict(), outcome=outcome)


@pytest.mark.parametrize("largest", [0, 1, 17, 23, 24, 25, 40, 100])
def test_the_largest_micro_batch_is_found_wherever_it_is(largest):
    model = replace(TINY, vocab_size=2048)
    question = Question(model=model, plan=Plan(seq_len=32), limit_bytes=24 * MiB, gpus=None)
    assert question.predicted == 25
    records: list[Record] = []
    while (known := frontier(question, records)).next_try is not None:
        assert known.next_try not in [record.case["plan"]["micro_batch"] for record in records]
        records.append(tried(question, known.next_try, largest))
    assert known.found == largest
    assert len(records) <= 14
    assert str(known).endswith(f"predicted {question.predicted}, found {largest}")


def test_a_crash_leaves_the_question_open():
    question = Question(model=TINY, plan=Plan(seq_len=32), limit_bytes=24 * MiB, gpus=None)
    crashed = Record(case=question.case(3).to_dict(), outcome="crashed")
    known = frontier(question, [crashed])
    assert (known.found, known.next_try) == (None, None)
    assert str(known).endswith("found crashed")


# The commands.


def test_the_smallest_form_says_that_it_is_on_cpu(tmp_path):
    file = tmp_path / "x.jsonl"
    only = "llama-100m in small, one rank bf16-mixed recompute=full first4"
    done = CliRunner().invoke(main, ["sweep", "--suite", "gpu-single", "--only", only, "--out", str(file)])
    assert done.exit_code == 0, done.output
    assert "gpu-single: PyTorch sees no GPU here, so this is its smallest form, on CPU" in done.output
    assert json.loads(file.read_text().splitlines()[0])["environment"]["device"] == "cpu"


def test_calibrate_goes_on_where_it_ended(tmp_path):
    file = tmp_path / "x.jsonl"
    done = CliRunner().invoke(main, ["calibrate", "--out", str(file)])
    assert done.exit_code == 0, done.output
    timings = read_timings(file)
    assert {timing.kind for timing in timings} == {
        "matmul", "attention", "attention backward", "copy", "add", "launch", "synchronize",
    }  # fmt: skip
    assert all(timing.median_s >= timing.least_s > 0 for timing in timings)
    lines = file.read_text().splitlines()
    assert json.loads(lines[0])["environment"]["device"] == "cpu"
    file.write_text("\n".join(lines[:4]) + "\n" + lines[4][:9])
    assert CliRunner().invoke(main, ["calibrate", "--out", str(file)]).exit_code == 2
    done = CliRunner().invoke(main, ["calibrate", "--out", str(file), "--resume"])
    assert done.exit_code == 0, done.output
    again = read_timings(file)
    assert [timing.key for timing in again] == [timing.key for timing in timings]
    assert again[:3] == timings[:3]


WITHOUT = """
import runpy, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("allpairspy", "rapidfuzz"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
sys.argv[1:] = ["sweep", "--suite", "gpu-frontier", "--list"]
runpy.run_module("validate", run_name="__main__")
"""


def test_gpu_suites_start_without_the_packages_that_only_the_matrix_and_explain_need():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
