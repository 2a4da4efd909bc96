"""Modules traced for CUDA where there is no GPU: equal to what memplan knows of its own ones, on any GPU."""

import json
from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.library import _scoped_library

import memplan
from memplan import Gpt, Llama, MissingRule
from memplan.device import A100, H100, Device
from memplan.models.recording import size_at
from memplan.models.trace_from_json import model_from_trace
from memplan.models.workspaces import Asked, runs_of
from memplan.ops.kernel_calls import kernel_events
from memplan.record import Alloc, Compute, ComputeKind, Free, unrolled
from memplan.shapes import BF16, FP32, INT64, Buffer, DType
from memplan.tape import OpContext
from memplan.tracing.autocast import KEY, NARROW, WIDEST
from memplan.tracing.calls import Called, kernel_called
from memplan.tracing.cuda import CUDA
from memplan.tracing.scratch import copied_before, scratch_of
from memplan.tracing.shapes import ATEN
from tests.traced import trace_of
from validate.systems.torch.wild import Encoder, Recurrent, UNet

SIZES: Any = {"n_layers": 4, "d_model": 128, "n_heads": 4, "d_ff": 352, "vocab_size": 499, "max_seq_len": 128}
FAMILIES = {
    "gpt": Gpt(name="gpt", dropout=0.1, **{**SIZES, "d_model": 80}),  # heads of 20, which are padded
    "llama": Llama(name="llama", n_kv_heads=2, **SIZES),
}

PLANS: tuple[dict[str, Any], ...] = (
    {"precision": "fp32", "micro_batch": 2},
    {"precision": "bf16", "micro_batch": 3},
    {"precision": "bf16", "micro_batch": 64},
    {"precision": "bf16-mixed", "micro_batch": 2, "global_batch": 4},
    {"precision": "bf16-mixed", "recompute": "full", "micro_batch": 40},
    {"precision": "fp16-mixed", "micro_batch": 2},
    {"precision": "bf16", "dp": 2, "micro_batch": 2},
    {"precision": "bf16-mixed", "dp": 2, "zero": 3, "micro_batch": 32},
    {"precision": "bf16-mixed", "dp": 2, "zero": 3, "recompute": "full", "micro_batch": 2},
)

GPUS = ("a100-80-sxm", "h100-sxm", "b200")


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    return FAMILIES[request.param], trace_of(FAMILIES[request.param], "cuda")


def computed(e: memplan.Estimate) -> Counter[Any]:
    """What is computed in the forward passes, and again in the backward passes.

    Without memory traffic: a trace does not say what a kernel reads.
    """
    found: Counter[Any] = Counter()
    for event, n in e.worst.record.step.counts.items():
        if not isinstance(event, Compute) or event.kind is ComputeKind.MEMORY:
            continue
        if event.phase != "backward":
            found[event.kind, event.operands, event.phase, event.flops, event.dtype.name] += n
    return found


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_trace_for_cuda_says_what_the_modules_family_says(pair, plan):
    model, traced = pair
    for gpu in GPUS:
        cluster = f"{plan.get('dp', 1)}x{gpu}"
        told, known = (memplan.estimate(one, cluster=cluster, **plan) for one in (traced, model))
        assert told.worst.states == known.worst.states
        assert told.peak.total_bytes == known.peak.total_bytes
        assert computed(told) == computed(known)


def test_a_trace_for_cuda_holds_for_other_lengths_whatever_its_attention(pair):
    model, traced = pair
    plan: dict[str, Any] = {"precision": "fp32", "micro_batch": 3, "seq_len": 72, "cluster": "1xh100-sxm"}
    told, known = (memplan.estimate(one, **plan) for one in (traced, model))
    angles = 0 if model.family == "gpt" else 4 * (128 - 72) * 32  # the module's are of all positions
    assert told.peak.total_bytes == known.peak.total_bytes + angles


def test_a_trace_for_cuda_is_refused_where_its_kernels_are_others(pair):
    _, traced = pair
    with pytest.raises(MissingRule, match=r"compute capability 8\.0 or more"):
        memplan.estimate(traced, cluster="1xv100-32", precision="fp32")
    with pytest.raises(MissingRule, match="trace it with device='cpu'"):
        memplan.estimate(traced, device="cpu", precision="fp32")


def test_kernels_are_read_from_a_file_by_name(pair, tmp_path):
    _, traced = pair
    traced.save(tmp_path / "mine.json")
    assert model_from_trace(tmp_path / "mine.json") == traced
    text = (tmp_path / "mine.json").read_text().replace('"table_gradient"', '"rm -rf"')
    (tmp_path / "strange.json").write_text(text)
    with pytest.raises(memplan.MemplanError, match="unknown phase 'rm -rf'"):
        model_from_trace(tmp_path / "strange.json")
    data = json.loads((tmp_path / "mine.json").read_text())
    part = data["recordings"][0]["parts"]["embed_backward"]
    event = next(one for one in part if isinstance(one, list) and len(one) == 4)
    event[1] = 10**9
    (tmp_path / "strange.json").write_text(json.dumps(data))
    with pytest.raises(memplan.MemplanError, match="results=1000000000 is not allowed"):
        model_from_trace(tmp_path / "strange.json")


def of_the_sum(module: nn.Module, inputs: torch.Tensor, **options: Any) -> memplan.TracedModel:
    return memplan.trace(module, inputs, loss=lambda output: output.sum(), device="cuda", **options)


def test_a_recurrent_network_is_refused_and_the_way_out_is_its_cells():
    with pytest.raises(MissingRule, match=r"lstm on CUDA keeps memory that only cuDNN knows.*nn\.LSTMCell"):
        of_the_sum(Recurrent(), torch.zeros(2, 16, dtype=torch.int64))


class Steps(nn.Module):
    """A recurrent network, a step at a time."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state = None
        for at in range(x.shape[1]):
            state = self.cell(x[:, at], state)
        return state[0]


def test_an_lstm_s_cell_is_one_kernel_and_its_gates_are_allocated_first():
    traced = of_the_sum(Steps(nn.LSTMCell(8, 4)), torch.zeros(2, 3, 8), precisions=["fp32"])
    recording = next(iter(traced.recordings.values()))
    cells = [
        recording.buffers[event.buffer].shape[1]
        for event in recording.parts["embed"]
        if event.kind == "alloc" and "_thnn_fused_lstm_cell" in recording.buffers[event.buffer].name
    ]
    assert [size_at(width, 2, 1) for width in cells] == 3 * [16, 4, 4]


def test_a_gru_s_cell_is_refused_as_pytorch_has_no_rule_of_its_shapes():
    with pytest.raises(MissingRule, match=r"use torch\.nn\.LSTMCell"):
        of_the_sum(Steps(nn.GRUCell(8, 4)), torch.zeros(2, 3, 8))


def test_workspaces_of_convolutions_are_said_to_be_left_out(tmp_path):
    traced = of_the_sum(UNet(), torch.zeros(2, 3, 32, 32), precisions=["bf16-mixed"])
    traced.save(tmp_path / "u-net.json")
    told = memplan.estimate(model_from_trace(tmp_path / "u-net.json"), seq_len=1, precision="bf16-mixed")
    assert "the workspaces of UNet's convolutions are not counted" in " ".join(told.notes)
    linear = of_the_sum(nn.Sequential(nn.Linear(4, 4)), torch.zeros(2, 4), precisions=["fp32"])
    assert not memplan.estimate(linear, seq_len=1, precision="fp32").notes


def test_what_cudnn_was_asked_is_allocated_where_it_was_asked(tmp_path):
    """With a micro-batch of 4 a convolution takes 2 MiB, and its weight's gradient 4 MiB."""
    traced = of_the_sum(nn.Conv2d(3, 8, 3), torch.zeros(2, 3, 32, 32), precisions=["fp32"])
    parts = [events for recording in traced.recordings.values() for events in recording.parts.values()]
    calls = dict.fromkeys(one for events in parts for one in events if one.kind == "workspace")
    assert [one.kernel for one in calls] == ["output", "weight"]
    runs = {one: runs_of({2: i * 2**20, 4: i * 2**21}) for i, one in enumerate(calls, 1)}
    asked = Asked(library="cuDNN 9.20.0", batches=(2, 4), runs={"h200": runs})
    replace(traced, asked=asked).save(tmp_path / "asked.json")
    model = model_from_trace(tmp_path / "asked.json")
    assert model.asked == asked
    told = {
        (gpu, micro_batch): memplan.estimate(
            model, cluster=f"1x{gpu}", micro_batch=micro_batch, seq_len=1, precision="fp32"
        )
        for gpu, micro_batch in (("h200", 4), ("h200", 3), ("b200", 4))
    }
    taken = {
        where: [e.buffer.n_bytes for _, e in unrolled(one.worst.record.step) if "cuDNN" in e.buffer.name]
        for where, one in told.items()
    }
    assert taken == {("h200", 4): [2**21, 2**21, 2**22, 2**22], ("h200", 3): [], ("b200", 4): []}
    notes = [" ".join(one.notes) for one in told.values()]
    assert "those that cuDNN 9.20.0 states for h200, asked without a GPU" in notes[0]
    assert "not counted" not in notes[0]
    assert "known with a micro-batch of 2 or 4" in notes[1]
    assert "known on h200" in notes[2]


def test_a_gradient_in_another_layout_is_copied_before_a_convolutions_backward_pass():
    """The gradient of patches that become tokens; the bias's is summed from it as it is, after the copy."""

    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = nn.Conv2d(3, 64, 4, stride=4)

        def forward(self, images):
            return self.patches(images).flatten(2).transpose(1, 2).contiguous()

    traced = of_the_sum(Patches(), torch.zeros(2, 3, 32, 32), precisions=["fp32"])
    recording = next(iter(traced.recordings.values()))
    (copy,) = [i for i, buffer in enumerate(recording.buffers) if "in order" in buffer.name]
    backward = [one for one in recording.parts["embed_backward"] if one.kind != "compute"]
    at = [one.kind for one in backward].index("workspace")
    assert [(one.kind, one.buffer) for one in (backward[at - 2], backward[at + 1])] == [
        ("alloc", copy),
        ("free", copy),
    ]
    assert backward[at + 2].kernel == "sum"


def test_batch_norm_of_images_in_float32_is_cudnn_s_and_under_autocast_is_pytorch_s():
    norm = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))
    neglected = {
        precision: of_the_sum(norm, torch.zeros(2, 8, 16, 16), precisions=[precision]).neglects
        for precision in ("fp32", "bf16-mixed")
    }
    assert neglected == {
        "fp32": ("convolutions", "batch norm in float32"),
        "bf16-mixed": ("convolutions",),
    }


def test_batch_norm_of_narrow_weights_is_refused_as_pytorch_refuses_it():
    norm = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))
    images = torch.zeros(2, 8, 16, 16)
    with pytest.raises(MissingRule, match="refused by PyTorch; use fp32, or bf16-mixed without FSDP2"):
        of_the_sum(norm, images, precisions=["bf16"])
    traced, plan = of_the_sum(norm, images), cast(Any, {"seq_len": 1, "dp": 2, "precision": "bf16-mixed"})
    assert memplan.estimate(traced, cluster="2xh100-sxm", **plan).fits
    with pytest.raises(MissingRule, match=r"if PyTorch runs it so \(on CUDA no batch norm"):
        memplan.estimate(traced, cluster="2xh100-sxm", zero=3, **plan)


class Sorting(nn.Module):
    """A linear layer whose outputs are ordered by a function."""

    def __init__(self, ordered):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.ordered = ordered

    def forward(self, x):
        return self.ordered(self.linear(x))


def peak_of(ordered):
    sums: dict[str, Any] = {"loss": lambda output: output.float().sum(), "device": "cuda"}
    traced = memplan.trace(Sorting(ordered), torch.zeros(2, 8), precisions=["fp32"], **sums)
    return memplan.estimate(traced, cluster="1xh100-sxm", precision="fp32", micro_batch=2).peak.total_bytes


def test_short_rows_are_sorted_with_their_places():
    """8 bytes for each element of a row, as PyTorch's allocator says without a GPU."""
    x = torch.zeros(2, 8)
    for ordered in (torch.sort, torch.topk):
        more = {} if ordered is torch.sort else {"k": 2}
        assert peak_of(lambda y, ordered=ordered, more=more: ordered(y, **more).values) > 0
    called = [kernel_called(ATEN.sort.default, (x, dim), {}, ()) for dim in (0, 1)]
    assert called == [Called("sort", sizes, "float32", 2) for sizes in ((8, 2), (2, 8))]
    assert kernel_called(ATEN.sort.stable, (x,), {"dim": 0}, ()) == called[0]
    assert kernel_called(ATEN.sort.default, (torch.tensor(1.0),), {}, ()) == Called(
        "sort", (1, 1), "float32", 2
    )
    assert scratch_of(ATEN.topk.default, (x, 2), (), CUDA) == ()


def test_indices_that_lie_in_different_orders_are_copied():
    """As in masks of transformers: `where[samples, tokens]`, samples and tokens both broadcast."""
    where = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    samples = torch.zeros(2, 1, dtype=torch.int64, device="meta")
    copies = copied_before(ATEN.index.Tensor, (where, [samples, samples.reshape(1, 2)]), CUDA)
    assert copies == (("indices in order", 4, torch.int64),) * 2
    assert copied_before(ATEN.index.Tensor, (where, [samples]), CUDA) == ()
    assert copied_before(ATEN.index.Tensor, (where, [where > 0]), CUDA) == ()


def scratch_bytes(
    name: str, sizes: tuple[int, ...], dtype: DType, device: Device, n_results: int
) -> list[int]:
    """What a kernel allocates beside its results, as PyTorch's allocator says without a GPU."""
    context = OpContext(device=device, torch_release=(2, 13))
    results = [Buffer("", (), dtype, 0, "temporaries") for _ in range(n_results)]
    events = kernel_events(name, sizes, dtype, results, context)
    return [e.buffer.n_bytes for e in events if isinstance(e, Alloc) and e.buffer not in results]


@pytest.mark.parametrize(
    "device, n_ids, n_bytes",
    [(H100, 4096, 0), (H100, 8192, 150_015), (H100, 65_536, 1_080_831), (A100, 65_536, 1_083_903)],
)
def test_the_experts_that_rows_go_to_are_sorted_by_cub_if_they_are_many(device, n_ids, n_bytes):
    assert scratch_bytes("sort", (1, n_ids), INT64, device, 2) == [8 * n_ids, *([n_bytes] if n_bytes else [])]


B200 = Device("cuda", (10, 0), 148)


@pytest.mark.parametrize(
    "device, sizes, dtype, scratch",
    [
        (H100, (8, 4096, 512, 1), BF16, [480, 67_584]),
        (H100, (7, 4096, 512, 1), BF16, [444, 67_584]),
        (H100, (8, 4096, 512, 1), FP32, []),
        (A100, (8, 4096, 512, 1), BF16, []),
        (B200, (8, 1031, 512, 1), BF16, [480, 795_648]),
        (B200, (8, 1032, 512, 1), BF16, [480, 871_424]),
        (B200, (8, 128, 512, 0), BF16, [480, 795_648]),
    ],
)
def test_the_products_of_experts_have_arguments_and_a_workspace(device, sizes, dtype, scratch):
    assert scratch_bytes("grouped_product", sizes, dtype, device, 1) == scratch


@pytest.mark.parametrize(
    "ordered, words",
    [
        (lambda y: torch.sort(y.repeat(1000, 1).flatten()).values, "a sort of 1 rows of 16000 float32"),
        (lambda y: torch.sort(y.repeat(1, 1000), dim=1).values, "a sort of 2 rows of 8000 float32"),
        (lambda y: torch.topk(y.flatten().repeat(100), 2).values, "topk of rows of 1600"),
        (lambda y: y[torch.randperm(2, device=y.device)], "randperm"),
    ],
)
def test_sorts_of_cub_are_refused(ordered, words):
    with pytest.raises(MissingRule, match=f"{words} on CUDA takes memory that only CUB knows"):
        peak_of(ordered)


class Adding(nn.Module):
    """A linear layer, to whose output a constant is added that Python code makes."""

    def __init__(self, made):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.made = made

    def forward(self, x):
        y = self.linear(x)
        return y + self.made(y)


CONSTANTS = {
    "tensor": lambda y: torch.tensor([1.0, 2.0], device=y.device),
    "tensor of a type's name": lambda y: torch.tensor([1.0, 2.0], device=y.device.type),
    "as_tensor": lambda y: torch.as_tensor([1.0, 2.0], device=y.device),
    "asarray": lambda y: torch.asarray([1.0, 2.0], device=y.device),
    "new_tensor": lambda y: y.new_tensor([1.0, 2.0]),
    "new": lambda y: y.new([1.0, 2.0]),
    "from the host": lambda y: torch.ones(2).to(y.device.type),
    "cuda": lambda y: torch.ones(2).cuda() if y.is_cuda else torch.ones(2),
    "like another": lambda y: torch.ones(2, dtype=torch.int64).to(y),
}


@pytest.mark.parametrize("made", CONSTANTS)
def test_a_constant_is_copied_to_the_gpu_however_it_is_made(made):
    """Eight bytes more on CUDA, as on CPU."""
    inputs, added = torch.zeros(2, 2), Adding(CONSTANTS[made])
    for device in ("cpu", "cuda"):
        traced = memplan.trace(added, inputs, loss=torch.sum, device=device, precisions=["fp32"])
        recording = next(iter(traced.recordings.values()))
        buffers = [recording.buffers[e.buffer] for e in recording.parts["embed"] if e.kind == "alloc"]
        constants = [one for one in buffers if [size_at(n, 2, 1) for n in one.shape] == [2]]
        assert [(size_at(one.n_bytes, 2, 1), one.dtype) for one in constants][-1] == (8, FP32), device


def test_a_number_read_from_a_constant_on_the_gpu_is_known():
    halved = Adding(lambda y: y / torch.tensor(2, device=y.device).item())
    assert of_the_sum(halved, torch.zeros(2, 2), precisions=["fp32"]).device == "cuda"


def test_what_the_host_computes_takes_no_memory_of_the_gpu():
    """Sums were refused with a wrong sentence, and what CUB finds on a GPU was said to be found there."""
    scaled = Adding(lambda y: y * int(torch.unique_consecutive(torch.arange(4)).sum()))
    assert of_the_sum(scaled, torch.zeros(2, 2), precisions=["fp32"]).device == "cuda"


def test_an_empty_cache_of_keys_is_traced_for_cuda(tmp_path):
    """As transformers' `DynamicCache` begins: `torch.tensor([], device=...)`."""
    joined = Adding(lambda y: torch.cat([torch.tensor([], dtype=y.dtype, device=y.device), y]))
    assert of_the_sum(joined, torch.zeros(2, 2), precisions=["fp32"]).limits is None


def test_an_operation_that_has_no_rule_of_shapes_is_named_in_one_sentence():
    """And nothing else of what PyTorch's dispatcher says, which is 1,500 characters long."""
    with _scoped_library("memplan_test", "FRAGMENT") as library:
        library.define("odd(Tensor x) -> Tensor")
        library.impl("odd", torch.neg, "CPU")
        odd = Adding(lambda y: torch.ops.memplan_test.odd(y.detach()))
        with pytest.raises(MissingRule, match=r"has no rule of shapes \(.*memplan_test.odd") as refused:
            of_the_sum(odd, torch.zeros(2, 2), precisions=["fp32"])
    assert len(str(refused.value)) < 350
    assert "Facebook" not in str(refused.value)


class Doubling(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(8, 8)

    def forward(self, x):
        return self.w(x * 2)


class Halved(nn.Module):
    """Two equal blocks, and between them what the second is called with is made."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Doubling() for _ in range(2))

    def forward(self, x):
        first, second = self.blocks
        x = first(x) / 2
        return second(x)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_a_block_may_free_the_input_that_was_made_after_the_block_before(precision):
    """As between the residual blocks in the middle of a diffusion model's U-Net."""
    traced = of_the_sum(Halved(), torch.zeros(2, 8), blocks="blocks", precisions=[precision])
    told = memplan.estimate(traced, cluster="1xh100-sxm", precision=precision, seq_len=1, micro_batch=64)
    assert told.fits
    assert told.worst.replayed.allocated_bytes >= told.peak.total_bytes


def test_a_module_is_traced_for_the_clusters_gpus():
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    module, plan = Encoder(), cast(Any, {"seq_len": 16, "precision": "bf16-mixed", "zero": 3})
    told = memplan.estimate(module, example_inputs=tokens, targets=tokens, cluster="2xa100-80-sxm", **plan)
    traced = memplan.trace(module, tokens, targets=tokens, device="cuda", precisions=["bf16-mixed"])
    assert told.peak.total_bytes == memplan.estimate(traced, cluster="2xa100-80-sxm", **plan).peak.total_bytes
    on_cpu = memplan.estimate(module, example_inputs=tokens, targets=tokens, device="cpu", dp=2, **plan)
    assert on_cpu.peak.total_bytes != told.peak.total_bytes


def test_tracing_for_cuda_leaves_pytorch_as_it_was():
    kept = torch.cuda._lazy_init, torch.Tensor._make_subclass, torch.clear_autocast_cache
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    memplan.trace(Encoder(), tokens, targets=tokens, device="cuda", precisions=["bf16-mixed"])
    assert (torch.cuda._lazy_init, torch.Tensor._make_subclass, torch.clear_autocast_cache) == kept
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::silu_backward", "CUDA")
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.Linear(4, 4)(torch.ones(1, 4)).dtype == torch.bfloat16


def test_autocasts_lists_name_operations_that_pytorch_casts():
    names = {name.removeprefix("aten::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names()
             if torch._C._dispatch_has_kernel_for_dispatch_key(name, KEY)}  # fmt: skip
    assert names >= NARROW | WIDEST
    assert not NARROW & WIDEST


class Cross(nn.Module):
    """Attention of 16 queries to 77 keys, two heads of 32, as cross-attention has them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = (nn.Parameter(torch.zeros(2, n, 32)) for n in (16, 77))

    def forward(self, x):
        q, k = self.q * x, self.k * x
        return nn.functional.scaled_dot_product_attention(q, k, k).square().mean()


@pytest.mark.parametrize("name", ["fused_attention", "efficient_attention"])
def test_attention_without_a_backward_pass_leaves_its_output_alone(name):
    (y,) = results = [Buffer("", (), BF16, 0, "temporaries")]
    context = OpContext(device=H100, torch_release=(2, 13))
    events = kernel_events(name, (2, 64, 64, 4, 4, 128, 0, 0), BF16, results, context)
    made, freed = ([e.buffer for e in events if isinstance(e, kind)] for kind in (Alloc, Free))
    assert set(made) - set(freed) == {y}
    assert y.n_bytes == 2 * 64 * 4 * 128 * 2


def test_cross_attention_in_float32_takes_what_its_kernel_allocates():
    """By attention_backward.cu: sums of rows padded to 32, dots, and tiles of queries only."""
    traced = memplan.trace(Cross(), torch.ones(2, 1, 1, 1), device="cuda", precisions=["fp32"])
    plan: dict[str, Any] = {"precision": "fp32", "micro_batch": 2, "seq_len": 1}
    step = memplan.estimate(traced, cluster="1xa100-80-sxm", **plan).worst.record.step
    made = [event.buffer for _, event in unrolled(step) if isinstance(event, Alloc)]
    n_bytes = {buffer.name: buffer.n_bytes for buffer in made}
    n_heads, a_tile = 2 * 2, 4 * 64 * 64 + 16
    assert n_bytes["tiles of gradients"] == n_heads * a_tile
    assert n_bytes["dots"] == n_heads * 16 * 4
    assert n_bytes["sums of terms"] == n_heads * 16 * 4
    y, log_sums = [b.n_bytes for b in made if b.name.endswith("efficient_attention")][:2]
    assert (y, log_sums) == (n_heads * 16 * 32 * 4, n_heads * 32 * 4)


class Biased(nn.Module):
    """Attention with a bias that is trained, as T5's and Swin's are; `strided`: heads are its last dim."""

    def __init__(self, *, strided: bool) -> None:
        super().__init__()
        self.tokens, self.heads = nn.Embedding(64, 64), nn.Linear(64, 64)
        self.bias = nn.Embedding(16, 4)
        self.strided = strided

    def forward(self, ids):
        q = self.heads(self.tokens(ids)).unflatten(-1, (4, 16)).transpose(1, 2)
        places = torch.arange(ids.shape[1], device=ids.device)
        bias = self.bias((places[:, None] - places).abs() % 16).permute(2, 0, 1)[None]
        bias = bias if self.strided else bias.contiguous()
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=bias).square().mean()


@pytest.mark.parametrize("strided", [True, False])
def test_a_mask_with_a_gradient_is_taken_by_the_kernel_that_pytorch_s_cuda_build_takes(strided):
    """Without a GPU 2.13 takes separate products where the last dim is strided, else the efficient kernel."""
    ids = torch.zeros(2, 112, dtype=torch.int64)
    traced = memplan.trace(Biased(strided=strided), ids, device="cuda", precisions=["bf16"])
    plan: dict[str, Any] = {"precision": "bf16", "micro_batch": 2}
    for cluster in ("1xa100-80-sxm", "1xh100-sxm"):
        e = memplan.estimate(traced, cluster=cluster, seq_len=64, **plan)
        made = [event.buffer for _, event in unrolled(e.worst.record.step) if isinstance(event, Alloc)]
        tiles = [buffer for buffer in made if buffer.name == "tiles of gradients"]
        assert bool(tiles) != strided
        of_scores = [buffer for buffer in made if buffer.n_bytes == 2 * 4 * 64 * 64 * (4 if strided else 2)]
        assert of_scores
    if not strided:
        with pytest.raises(MissingRule, match="multiple of 16"):
            memplan.estimate(traced, cluster="1xa100-80-sxm", seq_len=72, **plan)


class Crossed(nn.Module):
    """Attention between sequences of other lengths, whose output goes into the loss as it is."""

    def __init__(self, d_head: int) -> None:
        super().__init__()
        self.d_head = d_head
        self.q, self.kv = nn.Linear(4 * d_head, 4 * d_head), nn.Linear(4 * d_head, 4 * d_head)

    def forward(self, x, context):
        q, kv = (
            own(given).unflatten(-1, (4, self.d_head)).transpose(1, 2)
            for own, given in ((self.q, x), (self.kv, context))
        )
        return nn.functional.scaled_dot_product_attention(q, kv, kv).square().mean()


@pytest.mark.parametrize(
    "gpu, n_queries, n_keys, d_head, measured",
    [
        ("a100-80-sxm", 300, 77, 160, 31_670_172),
        ("a100-80-sxm", 300, 77, 128, 27_647_388),
        ("a100-80-sxm", 100, 300, 264, 50_599_044),
        ("h100-sxm", 300, 77, 160, 80_145_940),
    ],
)
def test_cross_attention_in_bf16_holds_what_was_measured(gpu, n_queries, n_keys, d_head, measured):
    """Requested bytes of a third step of AdamW in PyTorch 2.13's CUDA software without a GPU.

    FlashAttention divides keys, not queries, and copies a gradient that is not laid out by tokens; cuDNN's
    does not.
    """
    inputs = {"x": torch.zeros(2, n_queries, 4 * d_head), "context": torch.zeros(2, n_keys, 4 * d_head)}
    traced = memplan.trace(Crossed(d_head), inputs, device="cuda", precisions=["bf16"])
    e = memplan.estimate(traced, cluster=f"1x{gpu}", precision="bf16", micro_batch=2, seq_len=1)
    assert e.worst.peak_bytes == measured
