"""The GPU that is not there: its memory (compiled and run here), and what is said where it cannot be played.

What PyTorch's CUDA build makes of it is measured outside CI, and replayed from `data/`.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

import memplan
from memplan.device import H100
from memplan.errors import InvalidValue
from memplan.hardware import gpu
from memplan.kernels import cudnn_scratch
from memplan.shapes import BF16
from validate import workspaces
from validate.__main__ import main
from validate.cases import Case
from validate.gpus import gpus_played, known_as
from validate.launch import ForkServers, run_case
from validate.nogpu import RecordStream, build, environment_for, parts_told
from validate.suites import suite

PLAYED = Path(build.__file__).parent / "played"

PROGRAM = """
#include "device.h"
#include <cstdio>
#include <cstring>
using namespace played;
int main() {
    char small[4096], back[4096];
    std::memset(small, 7, sizeof small);
    void* a = allocate(1 << 20);
    void* b = allocate(100ull << 30);  // more than the machine has, and less than the GPU
    std::printf("%d %d %d\\n", a != nullptr, b != nullptr, allocate(1ull << 30) == nullptr);
    std::printf("%zu %d %d\\n", used_bytes(), on_device(static_cast<char*>(a) + 99), on_device(small));
    copy(a, small, sizeof small);
    copy(back, a, sizeof back);
    std::printf("%d\\n", back[4095]);
    copy(back, static_cast<char*>(a) + 4000, 200);  // a part of it that nothing was copied to
    std::printf("%d\\n", back[0]);
    copy(static_cast<char*>(a) + 100, b, 50);  // unknown bytes over known ones
    copy(back, static_cast<char*>(a) + 90, 20);
    std::printf("%d\\n", back[0]);
    copy(back, static_cast<char*>(a) + 150, 20);
    std::printf("%d\\n", back[0]);
    bool released = release(a);
    std::printf("%d %d\\n", released, release(a));
    void* host = allocate_on_host(99);
    bool locked = locked_on_host(host), freed = release_on_host(host);
    std::printf("%d %d %d\\n", locked, freed, locked_on_host(host));
    std::printf("%zu %s %d.%d\\n", used_bytes() >> 30, gpu().name.c_str(), gpu().major, gpu().minor);
}
"""


AROUND = {
    "MEMPLAN_NOGPU_NAME": "x", "MEMPLAN_NOGPU_CAPABILITY": "86", "MEMPLAN_NOGPU_MULTIPROCESSORS": "2",
    "MEMPLAN_NOGPU_BYTES": str(101 * 2**30), "MEMPLAN_NOGPU_KERNELS": "80", "MEMPLAN_NOGPU_THREADS": "1536",
    "MEMPLAN_NOGPU_BYTES_PER_S": "1e12", "MEMPLAN_NOGPU_RECORD_STREAM": "late",
}  # fmt: skip


def compiled(program, names, folder):
    """A program with some of the stand-in's sources, which need no header of NVIDIA's."""
    (folder / "main.cpp").write_text(program)
    sources = [str(folder / "main.cpp"), *(str(PLAYED / f"{name}.cpp") for name in names)]
    command = ["g++", *build.FLAGS, "-Werror", f"-I{PLAYED}", *sources, "-o", str(folder / "program"), "-ldl"]
    subprocess.run(command, check=True, timeout=120)
    return folder / "program"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_device_memory_is_address_space_that_ends_where_the_gpu_s_does(tmp_path):
    program = compiled(PROGRAM, ["device"], tmp_path)
    done = subprocess.run([program], capture_output=True, text=True, check=True, env=AROUND)
    assert done.stdout.splitlines() == [
        "1 1 1", f"{2**21 + 100 * 2**30} 1 0", "7", "0", "0", "7", "1 0", "1 1 0", "100 x 8.6",
    ]  # fmt: skip
    lacking = subprocess.run([program], capture_output=True, text=True, check=False, env={})
    assert "started by validate/nogpu" in lacking.stderr


REPORT = """
#include <cstdint>
#include <cstdio>
namespace c10 {
struct Device { int8_t type, index; };
void reportMemoryUsageToProfiler(void*, int64_t bytes, size_t allocated, size_t reserved, Device device)
"""

PROFILER = (
    REPORT
    + """{
    std::printf("%d %d %d %d %d\\n", int(bytes), int(allocated), int(reserved), device.type, device.index);
}
}
"""
)

BLOCKS_PROGRAM = (
    REPORT
    + """;
}
#include "device.h"
#include <cstring>
#include <dlfcn.h>
using namespace played;
constexpr c10::Device HOST{0, -1}, GPU{1, 0};
int read(const char* from) {
    char back = 9;
    copy(&back, from, 1);
    return back;
}
int main(int, char** arguments) {
    void* torch = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    char small[4096];
    std::memset(small, 7, sizeof small);
    char* block = static_cast<char*>(allocate(4096));
    copy(block, small, sizeof small);
    c10::reportMemoryUsageToProfiler(block, -4096, 0, 2048, GPU);
    c10::reportMemoryUsageToProfiler(block, 512, 0, 2048, HOST);
    std::printf("%d\\n", read(block));
    c10::reportMemoryUsageToProfiler(block + 512, 1024, 1024, 2048, GPU);
    std::printf("%d%d%d%d\\n", read(block + 511), read(block + 512), read(block + 1535), read(block + 1536));
    copy(block + 512, small, 512);
    std::printf("%d%d\\n", read(block + 1023), read(block + 1024));
    return torch == nullptr;
}
"""
)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_block_that_is_handed_out_reads_as_zeros_until_something_is_copied_to_it(tmp_path):
    """PyTorch's own function of that name hears every report too."""
    program = compiled(BLOCKS_PROGRAM, ["device", "blocks"], tmp_path)
    source, profiler = tmp_path / "profiler.cpp", tmp_path / "libc10.so"
    source.write_text(PROFILER)
    named = [*build.FLAGS, "-w", "-shared", "-Wl,-soname,libc10.so"]
    subprocess.run(["g++", *named, str(source), "-o", str(profiler)], check=True, timeout=120)
    done = subprocess.run([program, profiler], capture_output=True, text=True, check=True, env=AROUND)
    assert done.stdout.splitlines() == [
        "-4096 0 2048 1 0", "512 0 2048 0 -1", "7", "1024 1024 2048 1 0", "7007", "70",
    ]  # fmt: skip


def test_a_pytorch_whose_blocks_cannot_be_seen_is_refused(monkeypatch):
    monkeypatch.setattr(build, "_run", lambda *_: "                 U cudaMalloc")
    with pytest.raises(build.NoGpuUnavailable, match="new tensors would read what older ones left"):
        build._check_reports(Path("libc10_cuda.so"))


NCCL_PROGRAM = """
#include <cstdio>
extern "C" {
struct Id { char bytes[128]; };
int ncclCommInitRank(void**, int, Id, int);
void memplan_nogpu_part_has(int);
int ncclCommSplit(void*, int, int, void**, void*);
int ncclCommCount(void*, int*);
int ncclAllGather(const void*, void*, size_t, int, void*, void*);
int ncclReduceScatter(const void*, void*, size_t, int, int, void*, void*);
}
int main() {
    void *whole, *part;
    ncclCommInitRank(&whole, 1024, Id{}, 1021);
    int refused = ncclCommSplit(whole, 7, 1, &part, nullptr), ranks;
    memplan_nogpu_part_has(2);
    ncclCommSplit(whole, 7, 1, &part, nullptr);
    ncclCommCount(part, &ranks);
    char own = 5, all[3] = {0, 0, 9}, one = 0;
    ncclAllGather(&own, all, 1, 0, part, nullptr);
    const char halves[2] = {3, 4};
    ncclReduceScatter(halves, &one, 1, 0, 0, part, nullptr);
    std::printf("%d %d %d%d%d %d\\n", refused, ranks, all[0], all[1], all[2], one);
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_group_that_is_split_off_has_its_own_ranks_in_nccl_s_collectives(tmp_path):
    """Rank 1,021 of 1,024 is the second of two: it gathers two parts, and takes the second one of a sum."""
    program = compiled(NCCL_PROGRAM, ["device", "nccl", "streams"], tmp_path)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4", "2", "559", "4"]
    assert "nobody has said into how many ranks" in done.stderr


STREAMS_PROGRAM = """
#include "streams.h"
#include <cstdio>
using namespace played;
extern "C" {
struct Id { char bytes[128]; };
int ncclCommInitRank(void**, int, Id, int);
int ncclSend(const void*, size_t, int, int, void*, void*);
}
void* recorded(const void* stream) {
    void* event = new_event();
    record(event, stream);
    return event;
}
int main() {
    const char streams[3] = {};
    const char *gathers = streams, *computes = streams + 1, *reduces = streams + 2;
    void *never = new_event(), *gathered = recorded(gathers), *reduced = recorded(reduces);
    stream_waits(computes, gathered);
    void *computed = recorded(computes), *later = recorded(gathers);
    std::printf("%d%d%d", is_over(never), is_over(gathered), is_over(computed));
    std::printf("%d%d\\n", is_over(later), is_over(reduced));
    host_waits_for_event(computed);
    std::printf("%d%d%d%d\\n", is_over(gathered), is_over(computed), is_over(later), is_over(reduced));
    host_waits_for_stream(gathers);
    std::printf("%d%d %d\\n", is_over(later), is_over(reduced), is_over_for_watchdog(gathered));
    record(gathered, gathers);  // anew
    std::printf("%d\\n", is_over(gathered));
    host_waits_for_device();
    std::printf("%d%d %d\\n", is_over(gathered), is_over(reduced), is_over_for_watchdog(gathered));
    void* group;
    ncclCommInitRank(&group, 2, Id{}, 0);
    reduced = recorded(reduces);
    ncclSend(nullptr, 0, 0, 1, group, const_cast<char*>(reduces));
    later = recorded(reduces);
    ncclSend(nullptr, 0, 0, 1, group, const_cast<char*>(gathers));
    host_waits_for_stream(gathers);
    std::printf("%d%d\\n", is_over(reduced), is_over(later));
    destroy_event(never);
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    "record_stream, seen",
    [("early", "11111 1111 11 0 1 11 1 11"), ("late", "10000 1100 10 0 0 11 1 10")],
)
def test_late_work_is_over_once_the_host_has_waited_for_it_through_streams(tmp_path, record_stream, seen):
    """Or through a communicator, which does one thing after the other, whatever streams they are asked of."""
    program = compiled(STREAMS_PROGRAM, ["device", "nccl", "streams"], tmp_path)
    here = AROUND | {"MEMPLAN_NOGPU_RECORD_STREAM": record_stream}
    done = subprocess.run([program], capture_output=True, text=True, check=True, env=here)
    assert done.stdout.split() == seen.split()


class Split:
    """Stands for `ProcessGroup`."""

    def split_group(self, ranks, *, group_desc):
        return ranks, group_desc


def test_the_size_of_each_group_that_is_split_off_is_told(monkeypatch):
    told: list[int] = []
    library = SimpleNamespace(memplan_nogpu_part_has=told.append)
    monkeypatch.setattr("ctypes.CDLL", lambda _: library)
    monkeypatch.setattr(torch.distributed, "ProcessGroup", Split)
    with parts_told():
        assert Split().split_group([3, 7], group_desc="dp") == ([3, 7], "dp")
    Split().split_group([1], group_desc="tp")
    assert told == [2]


def test_a_cpu_build_of_pytorch_is_told_apart_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    build.library.cache_clear()
    done = CliRunner().invoke(main, ["sweep", "--suite", "gpu-single", "--device", "nogpu"])
    assert done.exit_code == 2
    assert "is a CPU build" in done.output
    assert "`make nogpu` sets one up" in " ".join(done.output.split())
    assert not build.can_be_built()


def test_without_a_compiler_there_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.delenv("CXX", raising=False)
    build.library.cache_clear()
    with pytest.raises(build.NoGpuUnavailable, match="no C\\+\\+ compiler was found; install g\\+\\+"):
        build.library()


def test_only_processes_started_for_it_get_the_stand_in(monkeypatch, tmp_path):
    monkeypatch.setattr("validate.nogpu.processes.library", lambda: tmp_path / build.LIBRARY)
    monkeypatch.setattr("validate.nogpu.processes.real_cudnn", lambda: tmp_path / "libcudnn.so.9")
    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: "sm_80 sm_86 sm_90", raising=False)
    assert environment_for(gpu("l40s"))["MEMPLAN_NOGPU_KERNELS"] == "86"
    around = environment_for(gpu("h100-sxm"))
    assert around["LD_PRELOAD"] == str(tmp_path / build.LIBRARY)
    assert around["MEMPLAN_NOGPU_CAPABILITY"] == "90"
    assert around["MEMPLAN_NOGPU_BYTES"] == str(gpu("h100-sxm").usable_bytes)
    assert around["MEMPLAN_NOGPU_RECORD_STREAM"] == "early"
    assert environment_for(gpu("h100-sxm"), "late")["MEMPLAN_NOGPU_RECORD_STREAM"] == "late"
    assert "LD_PRELOAD" not in os.environ


@pytest.mark.parametrize("name", ["mi300x", "cpu"])
def test_only_nvidia_s_gpus_can_be_played(name):
    with pytest.raises(InvalidValue, match="no CUDA compute capability; use one of NVIDIA's"):
        environment_for(gpu(name))


def test_a_real_gpu_is_known_by_what_its_kernels_depend_on():
    assert known_as("NVIDIA A100-SXM4-40GB", (8, 0), 108, 40 * 2**30) in ("a100-40-sxm", "a100-40-pcie")
    assert known_as("NVIDIA H200", (9, 0), 132, 150_000_000_000) == "h200"
    with pytest.raises(InvalidValue, match="add it to memplan/hardware"):
        known_as("NVIDIA Thor", (11, 0), 20, 2**37)


def test_a_gpu_is_named_for_nogpu_only():
    done = CliRunner().invoke(main, ["run", "--device", "cpu", "--gpu", "h100-sxm"])
    assert done.exit_code == 2
    assert "--gpu h100-sxm is for --device nogpu" in done.output


@pytest.mark.parametrize(
    "command", [["run", "--device", "cpu"], ["sweep", "--suite", "quick", "--device", "cpu", "--list"]]
)
def test_blocks_come_back_late_on_nogpu_only(command):
    done = CliRunner().invoke(main, [*command, "--record-stream", "late"])
    assert done.exit_code == 2
    assert "--record-stream late is for --device nogpu" in done.output


def test_cases_whose_blocks_come_back_late_have_a_fork_server_of_their_own(monkeypatch):
    asked: list[RecordStream] = []

    def environment(_gpu, record_stream):
        asked.append(record_stream)
        return {}

    monkeypatch.setattr("validate.launch.environment_for", environment)
    monkeypatch.setattr("validate.launch.ForkServer", lambda *_: SimpleNamespace(close=lambda: None))
    early = replace(suite("quick")[0], device="nogpu", gpu="h100-sxm")
    late = replace(early, record_stream="late")
    assert Case.from_dict(late.to_compact_dict()) == late
    with ForkServers() as servers:
        assert servers.of(early) is servers.of(early)
        assert servers.of(early) is not servers.of(late)
    assert asked == ["early", "late"]


def test_every_nvidia_gpu_of_the_table_says_its_capability():
    for name in ("a100-80-sxm", "h100-sxm", "b200"):
        known = gpu(name)
        assert known.device.capability == known.capability
        assert known.multiprocessors > 100


def last_line_on_an_h100(script: str, record_stream: RecordStream = "early") -> str:
    """What a script prints last, run on the stand-in for a GPU."""
    here = dict(os.environ) | environment_for(gpu("h100-sxm"), record_stream)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=here, timeout=300)
    return done.stdout.splitlines()[-1]


COMPILED = """
import torch
module = torch.nn.Sequential(torch.nn.RMSNorm(64), torch.nn.Linear(64, 256), torch.nn.GELU()).cuda()
x = torch.empty(4, 64, device="cuda", requires_grad=True)
y = torch.compile(module)(x)
y.sum().backward()
print(tuple(y.shape), x.grad is not None)
"""


@pytest.mark.slow
@pytest.mark.skipif(not build.can_be_built(), reason="no CUDA build of PyTorch, or no compiler")
def test_a_compiled_module_runs_forward_and_backward():
    assert last_line_on_an_h100(COMPILED) == "(4, 256) True"


CONVOLVED = """
import torch
layer = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False, device="cuda", dtype=torch.bfloat16)
x = torch.empty(32, 64, 56, 56, device="cuda", dtype=torch.bfloat16)
with torch.no_grad():
    y = layer(x)
print(torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() >= x.numel() * x.element_size())
"""


@pytest.mark.slow
@pytest.mark.skipif(not build.can_be_built(), reason="no CUDA build of PyTorch, or no compiler")
def test_the_real_cudnn_says_what_workspace_a_convolution_needs():
    """At least a copy of the input with its channels last, which is how tensor cores take it."""
    assert last_line_on_an_h100(CONVOLVED) == "True"


@pytest.mark.slow
@pytest.mark.skipif(not build.can_be_built(), reason="no CUDA build of PyTorch, or no compiler")
def test_cudnn_answers_about_the_convolutions_of_a_trace(monkeypatch):
    """Copies of all three tensors with their channels last, and a few partial sums of a weight's gradient."""
    monkeypatch.setattr(workspaces, "BATCHES", (1, 32))
    monkeypatch.setattr(workspaces, "GPUS", ("h100-sxm",))
    layer, images = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False), torch.zeros(2, 64, 56, 56)
    traced = memplan.trace(
        layer, images, loss=lambda output: output.sum(), device="cuda", precisions=["bf16"]
    )
    asked = workspaces.asked_of_cudnn(traced).asked
    assert asked.knows("h100-sxm", 32)
    n_weights = 64 * 64 * 3 * 3
    copies = 2 * (2 * 32 * 64 * 56 * 56 + n_weights)
    for call in asked.runs["h100-sxm"]:
        assert copies <= asked.n_bytes(call, "h100-sxm", 32) < copies + 4 * (4 * n_weights)


ATTENDED = """
import os, torch
tensor = lambda n: torch.empty(2, n, 513, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
q, k, v = tensor(8), tensor(2), tensor(2)
torch.cuda.memory._record_memory_history(context=None)
y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
torch.autograd.grad(y, (q, k, v), torch.empty_like(y))
trace = torch.cuda.memory._snapshot()["device_traces"][0]
requested = [entry["size"] for entry in trace if entry["action"] == "alloc"]
print(requested[4], requested[-1], flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not build.can_be_built(), reason="no CUDA build of PyTorch, or no compiler")
def test_the_real_cudnn_says_what_workspaces_attention_needs():
    shapes = (2, 513, 8, 128), (2, 513, 2, 128)
    scratch = cudnn_scratch(H100, (2, 13), *shapes, BF16, dropout=False)
    assert last_line_on_an_h100(ATTENDED) == f"{scratch.forward_bytes} {scratch.backward_bytes}"


REUSED = """
import torch
ones = torch.ones(1000).cuda()
copied, address = ones.sum().item(), ones.data_ptr()
known = ones.cpu().sum().item()
del ones
new = torch.empty(1000, device="cuda")
print(new.data_ptr() == address, known, new.cpu().sum().item(), copied, (new + 1).cpu().max().item())
"""


@pytest.mark.slow
@pytest.mark.skipif(not build.can_be_built(), reason="no CUDA build of PyTorch, or no compiler")
@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_a_new_tensor_never_reads_what_an_older_one_left_at_its_address(monkeypatch, settings):
    """It reads as zeros, and so does what a kernel computes into one."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
    assert last_line_on_an_h100(REUSED) == "True 1000.0 0.0 0.0 0.0"


COUNTED = """
import torch
older = [torch.ones(n).cuda() for n in (1, 64, 1000)]
del older  # small blocks that hold ones wait to be handed out
unknown, ones = torch.empty(50, 3, device="cuda"), torch.ones(50).cuda()
mask = torch.ones(50, dtype=torch.bool).cuda()
lengths = [
    len(unknown.nonzero()), len(ones.nonzero()), len(unknown[unknown[:, 0] > 0]), len(unknown[mask]),
    len(ones.masked_select(mask)), len(torch.where(mask)[0]), len(torch.unique(ones)),
    len(torch.unique_consecutive(ones)),
]
ones[mask] = 2.0
ones[mask] = ones[:0]
try:
    ones[mask] = torch.ones(50).cuda()
except RuntimeError as error:
    print(*lengths, "to indexing result of shape [0]" in str(error))
"""


@pytest.mark.slow
@pytest.mark.skipif(not build.can_be_built(), reason="no CUDA build of PyTorch, or no compiler")
def test_a_length_that_a_kernel_counts_is_zero():
    """Of every tensor: one that nothing was copied to, and one of ones."""
    assert last_line_on_an_h100(COUNTED) == "0 0 0 0 0 0 0 0 True"


SHARED_BY_STREAMS = """
import torch
side = torch.cuda.Stream()
for step in range(6):
    with torch.cuda.stream(side):
        block = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    block.record_stream(torch.cuda.current_stream())
    del block
    if step == 3:
        torch.cuda.current_stream().synchronize()
print(torch.cuda.max_memory_allocated() >> 28, torch.cuda.max_memory_reserved() >> 28)
"""


@pytest.mark.slow
@pytest.mark.skipif(not build.can_be_built(), reason="no CUDA build of PyTorch, or no compiler")
@pytest.mark.parametrize("record_stream, blocks", [("early", "1 1"), ("late", "1 4")])
def test_blocks_that_another_stream_has_used_come_back_early_or_late(record_stream, blocks):
    assert last_line_on_an_h100(SHARED_BY_STREAMS, record_stream) == blocks


@pytest.mark.slow
@pytest.mark.skipif(not build.can_be_built(), reason="no CUDA build of PyTorch, or no compiler")
def test_fsdp1_reserves_at_least_as_much_when_its_blocks_come_back_late():
    """Its all-gathers and reductions are on other streams; what is allocated is the same."""
    cases = suite("gpu-fsdp1", gpus_played("h100-sxm"))
    early = next(case for case in cases if case.plan.recompute == "full")
    with ForkServers() as servers:
        ends = [run_case(case, servers=servers) for case in (early, replace(early, record_stream="late"))]
    (at_once,), (afterwards,) = ([rank.memory for rank in end.ranks] for end in ends)
    assert afterwards.peak_allocated_bytes == at_once.peak_allocated_bytes
    assert afterwards.peak_reserved_bytes > at_once.peak_reserved_bytes
