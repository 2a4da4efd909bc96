"""Traced modules: equal to what memplan knows of its own ones; files of strangers; what is refused."""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import memplan
from memplan import Gpt, InvalidValue, Llama, MissingRule, PlanRefused, TracedModel, UnknownName
from memplan.models.recording import Term
from memplan.models.trace_from_json import model_from_trace
from memplan.record import Compute, ComputeKind, flops_of, unrolled
from memplan.tracing.computed import computed_of
from memplan.tracing.shapes import ATEN, Operation, Shapes, tensors
from memplan.tracing.tracer import _Tracer
from tests.traced import trace_of
from validate.cases import shipped_trace
from validate.systems.torch.modules import Transformer, token_loss
from validate.systems.torch.wild import WILD

SIZES: Any = {
    "n_layers": 4,
    "d_model": 64,
    "n_heads": 4,
    "d_ff": 176,
    "vocab_size": 499,
    "max_seq_len": 96,
}
EIGHT_BILLION = cast(Llama, memplan.preset("llama-3-8b"))
FAMILIES = {"gpt": Gpt(name="gpt", **SIZES), "llama": Llama(name="llama", n_kv_heads=2, **SIZES)}

PLANS: tuple[dict[str, Any], ...] = (
    {},
    {"precision": "bf16", "micro_batch": 3, "optimizer": "sgd-momentum"},
    {"precision": "bf16-mixed", "global_batch": 4, "seq_len": 77},
    {"precision": "fp16-mixed", "global_batch": 2},
    {"recompute": "full", "micro_batch": 2},
    {"dp": 2, "global_batch": 6, "bucket_cap_bytes": 1 << 16},
    {"dp": 2, "zero": 1, "seq_len": 64},
    {"dp": 4, "zero": 2, "micro_batch": 5},
    {"dp": 4, "zero": 3, "precision": "bf16-mixed", "recompute": "full"},
    {"dp": 2, "zero": 3, "precision": "fp16-mixed", "micro_batch": 2},
    {"dp": 3, "zero": 3, "fsdp_blocks": 2},
    {"dp": 2, "zero": 3, "fsdp_units": "model", "set_to_none": False},
    {"dp": 2, "zero": 3, "fsdp_units": "block+ends", "micro_batch": 4},
    {"dp": 2, "zero": 3, "fsdp_units": "block+ends", "precision": "bf16-mixed", "recompute": "full"},
    {"dp": 2, "dp_replicate": 2, "zero": 3, "global_batch": 8, "recompute": "full", "recompute_blocks": 2},
)

on_cpu = partial(memplan.trace, device="cpu")

A_FEW_SCALARS = 16
"""Bytes: how the loss is scaled, whose numbers the kernels keep."""


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(8, 8)

    def forward(self, x):
        return self.w(x).sum()


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    return FAMILIES[request.param], trace_of(FAMILIES[request.param], "cpu")


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_trace_of_our_own_module_says_what_its_family_says(pair, plan):
    model, traced = pair
    plan = {"precision": "fp32", "seq_len": 96, **plan}
    if isinstance(model, Llama):
        plan["seq_len"] = 96  # the module holds the angles of so many positions
    told, known = (memplan.estimate(one, device="cpu", **plan) for one in (traced, model))
    assert told.n_parameters == known.n_parameters
    assert told.worst.states == known.worst.states
    assert [(c.kind, c.axis, c.calls, c.payload_bytes) for c in told.collectives] == [
        (c.kind, c.axis, c.calls, c.payload_bytes) for c in known.collectives
    ]
    # Kernels' own buffers are not at the worst instant, and the family's loss is outside autocast.
    assert abs(told.peak.total_bytes - known.peak.total_bytes) <= A_FEW_SCALARS * plan.get("micro_batch", 1)
    assert sum(told.worst.alive[b] * b.n_bytes for b in told.worst.alive) == told.peak.total_bytes
    assert min(told.worst.alive.values()) > 0


PIPELINES: tuple[dict[str, Any], ...] = (
    {"schedule": "gpipe"},
    {"micro_batch": 3, "precision": "bf16"},
    {"precision": "bf16-mixed", "recompute": "full"},
    {"pp": 4, "schedule": "gpipe", "precision": "bf16-mixed"},
    {"precision": "fp16-mixed", "micro_batch": 2},
    {"dp": 2, "zero": 3, "precision": "fp16-mixed"},
    {"layers_per_stage": (3, 1), "recompute": "full", "recompute_blocks": 1},
    {"virtual_stages": 2, "schedule": "interleaved-1f1b"},
    {"virtual_stages": 2, "schedule": "looped-bfs", "optimizer": "sgd-momentum"},
    {"dp": 2},
    {"dp": 2, "zero": 1},
    {"dp": 2, "zero": 2},
    {"dp": 2, "zero": 3, "precision": "bf16-mixed"},
    {"pp": 4, "dp": 2, "zero": 3, "set_to_none": False},
    {"dp": 2, "zero": 3, "fsdp_units": "block+ends"},
)


@pytest.mark.parametrize("plan", PIPELINES, ids=str)
def test_a_pipeline_over_a_trace_says_what_its_family_says(pair, plan):
    model, traced = pair
    plan = {"pp": 2, "precision": "fp32", "seq_len": 96, "device": "cpu", **plan}
    samples = 4 * plan.get("micro_batch", 1)
    plan["global_batch"] = samples * plan.get("dp", 1)
    told, known = (memplan.estimate(one, **plan) for one in (traced, model))
    tokens_bytes = samples * 96 * 8  # a rank with no first stage has no tokens; a traced module's all inputs
    for ours, its in zip(told.stages, known.stages, strict=True):
        assert ours.states == its.states
        more = tokens_bytes * (ours.record.rank.pp > 0)
        assert abs(ours.peak.total_bytes - its.peak.total_bytes - more) <= A_FEW_SCALARS * samples
        assert ours.record.step.net_bytes == its.record.step.net_bytes
    assert [(c.kind, c.axis, c.calls, c.payload_bytes) for c in told.collectives] == [
        (c.kind, c.axis, c.calls, c.payload_bytes) for c in known.collectives
    ]


def test_a_trace_is_a_value(pair, tmp_path):
    _, traced = pair
    traced.save(tmp_path / "trace.json")
    again = model_from_trace(tmp_path / "trace.json")
    assert again == traced
    assert hash(again) == hash(traced)
    assert (
        memplan.estimate(str(tmp_path / "trace.json"), zero=3, dp=2).peak
        == memplan.estimate(traced, zero=3, dp=2).peak
    )
    code = f"""
import sys
sys.modules["torch"] = None
import memplan
print(memplan.estimate({str(tmp_path / "trace.json")!r}).peak.total_bytes)
"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert int(out) == memplan.estimate(traced).peak.total_bytes


@pytest.mark.parametrize(
    "key, plan",
    [("cut", {"pp": 2, "global_batch": 4}), ("ends", {"dp": 2, "zero": 3, "fsdp_units": "block+ends"})],
)
def test_a_trace_of_an_earlier_memplan_is_to_be_taken_again(pair, tmp_path, key, plan):
    _, traced = pair
    traced.save(tmp_path / "new.json")
    data = json.loads((tmp_path / "new.json").read_text())
    for recording in data["recordings"]:
        del recording[key]
    (tmp_path / "old.json").write_text(json.dumps(data, separators=(",", ":")))
    memplan.estimate(str(tmp_path / "new.json"), **plan)
    with pytest.raises(MissingRule, match=r"earlier memplan.*trace it again"):
        memplan.estimate(str(tmp_path / "old.json"), **plan)


def test_a_trace_in_the_first_format_says_what_it_said():
    old = model_from_trace(Path(__file__).parent / "trace-of-format-1.json")
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    new = on_cpu(
        module, torch.zeros(2, 3, 8, 8), loss=torch.sum, device="cuda", precisions=["fp32"], name=old.name
    )
    of_old, of_new = (
        memplan.estimate(one, cluster="1xh100-sxm", precision="fp32", micro_batch=64, seq_len=1)
        for one in (old, new)
    )
    assert of_old.peak.total_bytes == of_new.peak.total_bytes == 67_281_560
    assert of_old.reserved_bytes == of_new.reserved_bytes
    assert of_old.step_s
    assert of_new.step_s
    of_convolution, of_linear = 2 * 4 * 27 * 64 * 36, 2 * 64 * 144 * 5
    flops = 2 * of_convolution + 3 * of_linear  # the image has no gradient
    assert of_old.total_model_flops == of_new.total_model_flops == flops
    computed = [
        [
            (event.kind, event.operands)
            for event in e.worst.record.step.counts
            if isinstance(event, Compute) and event.kind is not ComputeKind.MEMORY
        ]
        for e in (of_old, of_new)
    ]
    no_operands = [(kind, ()) for kind in (ComputeKind.UNKNOWN, ComputeKind.CONVOLUTION)]
    assert set(computed[0]) == set(no_operands)
    assert set(computed[1]) == {
        (ComputeKind.CONVOLUTION, ((4, 3, 3, 3), (64, 4, 6, 6))),
        (ComputeKind.MM, ((64, 144), (144, 5))),
        (ComputeKind.MM, ((64, 5), (5, 144))),
        (ComputeKind.MM, ((5, 64), (64, 144))),
    }


@pytest.mark.parametrize("name", WILD)
def test_a_shipped_trace_knows_the_operands_of_all_that_it_computes(name):
    recordings = shipped_trace(name).recordings.values()
    computed = [e for one in recordings for part in one.parts.values() for e in part if e.kind == "compute"]
    assert computed
    assert all(event.computation.operands for event in computed)


def test_tracing_leaves_the_module_as_it_was():
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).eval()
    before = {name: (id(t), t.clone()) for name, t in [*module.named_parameters(), *module.named_buffers()]}
    on_cpu(module, torch.ones(4, 8), loss=torch.sum)
    assert not module.training
    assert "forward" not in vars(module[0])
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        identity, value = before[name]
        assert id(tensor) == identity
        assert torch.equal(tensor, value)
        assert tensor.grad is None


def test_the_ledger_has_the_modules_own_names():
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    e = memplan.estimate(module, example_inputs=torch.ones(64, 8), loss=torch.sum, seq_len=1, micro_batch=512)
    names = {buffer.name for buffer in e.worst.alive}
    assert {"0.weight", "2.bias.exp_avg", "1: relu"} <= names


def test_a_module_on_meta_of_any_size_is_traced():
    with torch.device("meta"):
        module = Transformer(EIGHT_BILLION, range(3), seq_len=64)
    tokens = torch.zeros(1, 64, dtype=torch.int64)
    traced = on_cpu(module, tokens, loss=lambda logits: logits.sum(), precisions=["fp32"])
    assert traced.n_layers == 3
    assert traced.n_parameters > 1e9


@pytest.mark.parametrize(
    "plan, words",
    [
        ({"tp": 2}, "tp=2"),
        ({"pp": 2, "schedule": "zero-bubble"}, "schedule='zero-bubble'"),
        ({"recompute": "selective"}, "selective"),
        ({"device": "cuda"}, "traced with the kernels of device='cpu'"),
        ({"engine": "textbook"}, "closed forms"),
    ],
)
def test_what_a_trace_cannot_tell_is_refused(pair, plan, words):
    with pytest.raises(MissingRule, match=words):
        memplan.estimate(pair[1], **plan)


class OnValues(Twice):
    def forward(self, x):
        y = self.w(x)
        return y.sum() if (y > 0).any() else -y.sum()


class Unused(Twice):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 2)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, dtype=torch.complex64))

    def forward(self, x):
        return self.w.abs().sum() * x.sum()


class OnANumber(Twice):
    def forward(self, x):
        y = self.w(x).sum()
        return y if y.item() > 0 else -y


class OnDistances(Twice):
    """Looks at floats that follow from positions, as relative attention does."""

    def forward(self, x):
        far = torch.arange(len(x)).float().log() > 1
        mask = torch.ones(len(x))
        return self.w(x).sum() if mask.to(torch.bool).all() and not far.all() else x.sum()


class OnWritten(Twice):
    """Looks at known floats after a part of them was overwritten."""

    def forward(self, x):
        found = torch.zeros(2, len(x))
        found[0] = self.w(x).sum(1)
        return found.sum() if found.any() else -found.sum()


class OnNumpy(Twice):
    def forward(self, x):
        y = self.w(x).sum()
        return y * float(y.detach().numpy())


def with_tensor(kind: str, tensor: torch.Tensor) -> nn.Module:
    """A module that trains and also holds this value."""
    module = Twice()
    if kind == "buffer":
        module.register_buffer("q", tensor)
    else:
        module.q = nn.Parameter(tensor, requires_grad=False)
    return module


def hooked(kind: str) -> nn.Module:
    module = Twice()
    getattr(module.w.weight, kind)(lambda _: None)
    return module


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # both go in a later release
    QUANTIZED = torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.quint8)
    SCRIPTED = torch.jit.script(nn.Linear(8, 8))


@pytest.mark.parametrize(
    "module, options, error, words",
    [
        (with_tensor("parameter", QUANTIZED), {}, InvalidValue, r"parameter q is of torch\.quint8; use real"),
        (with_tensor("buffer", QUANTIZED), {}, InvalidValue, r"buffer q is of torch\.quint8"),
        (
            with_tensor("parameter", torch.ones(4, dtype=torch.float8_e4m3fn)),
            {},
            InvalidValue,
            r"parameter q is of torch\.float8_e4m3fn",
        ),
        (
            with_tensor("buffer", TwoTensor(torch.ones(4), torch.ones(4))),
            {},
            InvalidValue,
            "buffer q is a TwoTensor",
        ),
        (nn.LazyLinear(8), {}, InvalidValue, "parameter weight has no shape yet"),
        (hooked("register_hook"), {}, InvalidValue, "parameter w.weight has hooks of its own"),
        (hooked("register_post_accumulate_grad_hook"), {}, InvalidValue, "has hooks of its own"),
        (cast(nn.Module, torch.compile(nn.Linear(8, 8))), {}, InvalidValue, r"is compiled .*OptimizedModule"),
        (SCRIPTED, {}, InvalidValue, "the module is compiled or replicated"),
        (nn.DataParallel(Twice()), {}, InvalidValue, r"replicated \(DataParallel\).*made of"),
        (OnANumber(), {}, MissingRule, r"OnANumber cannot be traced: aten\._local_scalar_dense"),
        (OnWritten(), {}, MissingRule, r"OnWritten cannot be traced: aten\._local_scalar_dense"),
        (OnNumpy(), {}, InvalidValue, r"OnNumpy fails as it is traced \(RuntimeError: \.numpy"),
        (
            nn.Linear(3, 8),
            {"loss": torch.sum},
            InvalidValue,
            r"Linear fails as it is traced \(RuntimeError: a",
        ),
        (nn.ReLU(), {}, InvalidValue, "no parameters"),
        ("gpt2", {}, InvalidValue, r"no torch\.nn\.Module"),
        (OnValues(), {}, MissingRule, r"OnValues cannot be traced: aten\.\S+ needs values"),
        (Complex(), {}, InvalidValue, r"parameter w is of torch\.complex64; use real floats"),
        (Twice().requires_grad_(False), {}, InvalidValue, "all parameters of Twice are frozen"),
        (nn.Linear(8, 8), {}, InvalidValue, "no loss"),
        (nn.Linear(8, 8), {"loss": lambda y: y}, InvalidValue, "one number"),
        (Twice(), {"blocks": "layers"}, InvalidValue, "has no list of modules; leave it out"),
        (nn.Sequential(Blocks()), {"blocks": "layer"}, UnknownName, r"list of blocks 'layer'.*'0\.layers'"),
        (Twice(), {"precisions": ["int3"]}, UnknownName, "precision"),
        (Twice(), {"example_inputs": ()}, InvalidValue, "hold no tensor"),
        (Twice(), {"example_inputs": 3}, InvalidValue, "a tensor, a tuple, or a dict"),
    ],
)
def test_what_cannot_be_traced_says_why(module, options, error, words):
    inputs = options.pop("example_inputs", torch.ones(4, 8)) if options else torch.ones(4, 8)
    with pytest.raises(error, match=words):
        on_cpu(module, inputs, **options)


def test_parameters_that_get_no_gradient_have_weights_alone_and_stop_ddp(tmp_path):
    """As in PyTorch: their `grad` stays None, so that no optimizer has states of them; DDP waits for them."""
    on_cpu(Unused(), torch.ones(4, 8), precisions=["fp32"]).save(tmp_path / "unused.json")
    traced = model_from_trace(tmp_path / "unused.json")
    assert traced.unused == ("idle.bias", "idle.weight")
    plan: dict[str, Any] = {"seq_len": 1, "precision": "fp32"}
    alone = memplan.estimate(traced, **plan).worst.states
    assert (alone.weights_bytes, alone.grads_bytes, alone.optimizer_bytes) == (78 * 4, 72 * 4, 2 * 72 * 4 + 8)
    assert memplan.estimate(traced, dp=2, zero=3, **plan).worst.states.grads_bytes == 36 * 4
    with pytest.raises(PlanRefused, match=r"2 parameters .* get no gradient \(idle\.bias.*use FSDP2"):
        memplan.estimate(traced, dp=2, **plan)


class Between(nn.Module):
    """Two equal layers with a layer between them, and a parameter that both use."""

    def __init__(self, *, shares: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.between = nn.Parameter(torch.ones(8)) if shares else nn.Linear(8, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) * self.between if isinstance(self.between, nn.Parameter) else self.between(layer(x))
        return x.sum()


@pytest.mark.parametrize("shares", [False, True])
def test_blocks_make_the_gradients_of_their_own_parameters_only(shares):
    """Else a block's gradients would be no unit's of FSDP2; DDP would not send what is not any block's."""
    module = Between(shares=shares)
    traced = on_cpu(module, torch.ones(4, 8), precisions=["fp32"])
    assert traced.n_layers == 0
    plan: dict[str, Any] = {"seq_len": 1, "precision": "fp32", "dp": 2}
    told = memplan.estimate(traced, device="cpu", **plan)
    assert [c.payload_bytes for c in told.collectives] == [4 * traced.n_parameters]
    assert memplan.estimate(traced, device="cpu", zero=3, **plan).worst.states.grads_bytes > 0
    with pytest.raises(InvalidValue, match=r"layers\.\d makes the gradient of between.*not its own"):
        on_cpu(module, torch.ones(4, 8), blocks="layers")


def test_lengths_that_are_traced_are_no_dims_of_weights(monkeypatch):
    """Else a mask of 64 by 64 tokens would be taken for hidden states of 64, as in hf-gemma2."""
    points: set[tuple[int, int]] = set()
    run = _Tracer.run

    def noted(self, point, variant):
        points.add(point)
        return run(self, point, variant)

    monkeypatch.setattr(_Tracer, "run", noted)
    module = nn.Sequential(nn.Embedding(48, 64), nn.Linear(64, 32))
    tokens = torch.zeros(2, 64, dtype=torch.long)
    on_cpu(module, tokens, loss=torch.sum, precisions=["fp32"])
    assert {length for _, length in points - {(2, 64)}}.isdisjoint({32, 48, 64})
    limits = {name: shipped_trace(name).limits or (0, 0) for name in WILD}
    assert {name for name, (_, length) in limits.items() if length} == {"lstm"}


class Promoting(Twice):
    """A mask in float32 widens a product, which PyTorch then refuses to multiply with narrow values."""

    def __init__(self, multiplied: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(8))
        self.multiplied = multiplied

    def forward(self, x):
        y = self.w(x)
        return self.multiplied(y * self.mask, y.t()).sum()


@pytest.mark.parametrize("multiplied", [torch.mm, lambda a, b: torch.bmm(a[None], b[None])])
def test_weights_of_a_type_that_the_module_fails_with_are_left_out(multiplied):
    module = Promoting(multiplied)
    traced = on_cpu(module, torch.ones(4, 8))
    assert {variant.weights for variant in traced.recordings} == {"float32"}
    assert memplan.estimate(traced, seq_len=1, precision="bf16-mixed").peak.total_bytes > 0
    for plan in ({"precision": "bf16"}, {"precision": "bf16-mixed", "dp": 2, "zero": 3}):
        with pytest.raises(MissingRule, match=r"with zero=\d takes weights in bfloat16"):
            memplan.estimate(traced, seq_len=1, **cast(Any, plan))
    with pytest.raises(InvalidValue, match=r"fails as it is traced \(RuntimeError"):
        on_cpu(module, torch.ones(4, 8), precisions=["bf16"])


class Experts(nn.Module):
    """Rows go to two of four experts, each one matrix, as `transformers.integrations.moe` computes them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.Parameter(torch.zeros(4, 16, 24))

    def forward(self, x):
        rows = x.flatten(0, -2)
        shares, chosen = self.router(rows).softmax(-1).topk(2)
        expert, order = torch.sort(chosen.flatten())
        n_rows = torch.histc(expert.float() if x.device.type == "cpu" else expert.int(), 4, 0, 3)
        up_to = n_rows.cumsum(0, dtype=torch.int32)
        y = torch._grouped_mm(rows[order // 2].to(self.experts.dtype), self.experts, offs=up_to)
        return (y * shares.flatten()[order, None]).sum()


def test_experts_multiply_the_rows_that_are_sent_to_them_whichever_they_are():
    tokens = torch.zeros(2, 12, 16)
    traced = on_cpu(Experts(), tokens, precisions=["fp32"])
    computed = memplan.estimate(traced, micro_batch=5, seq_len=1, precision="fp32").total_model_flops
    of_router, of_experts = 2 * 16 * 4, 2 * 2 * 16 * 24
    assert computed == 2 * 5 * 12 * (of_router + of_experts)  # the rows have no gradient


class OwnCheckpoints(nn.Module):
    """Layers that the module itself recomputes, as torch.utils.checkpoint recommends; some may be frozen."""

    def __init__(self, n: int, frozen: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(n))
        self.blocks[:frozen].requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(*[nn.Linear(32, 32).requires_grad_(i == 8) for i in range(9)]),
        nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)),
        nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True),
        OwnCheckpoints(4),
        OwnCheckpoints(4, frozen=2),
    ],
    ids=["a trained last layer", "a perceptron", "attention", "own checkpoints", "own checkpoints, frozen"],
)
def test_flops_are_those_that_pytorch_counts_as_the_module_runs(module):
    x = torch.randn(3, 8, 32)
    traced = on_cpu(module, x, loss=torch.sum, precisions=["fp32"])
    estimate = memplan.estimate(traced, micro_batch=3, seq_len=1, precision="fp32")
    with FlopCounterMode(display=False) as counter:
        module(x).sum().backward()
    assert estimate.total_model_flops + estimate.worst.recomputed_flops == counter.get_total_flops()


class Filled(nn.Module):
    """Sums and fills that PyTorch's own code runs in place, and one of the module's own that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.projection, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x, places):
        strided = self.projection(x.transpose(0, 1)).transpose(0, 1)
        shifted = self.norm(strided) + self.projection.bias
        chosen = shifted.gather(-1, places) + shifted[:, :2, :3] + shifted.topk(3).values
        return chosen.logsumexp(-1).mean()


def test_what_pytorch_writes_in_place_has_no_storage_of_its_own_and_copies_have():
    inputs = torch.zeros(4, 2, 16), torch.zeros(4, 2, 3, dtype=torch.int64)
    traced = on_cpu(Filled(), inputs, precisions=["bf16"])
    step = memplan.estimate(
        traced, micro_batch=4, seq_len=1, precision="bf16", device="cpu"
    ).worst.record.step
    made = [(event.buffer.name, event.buffer.n_bytes) for _, event in unrolled(step) if event.sign > 0]
    names = [name.split(": ")[-1] for name, _ in made]
    assert names.count("mm") == names.count("input in order") == 2
    before = [names[i + 1] for i, name in enumerate(names) if name == "input in order"]
    assert all("native_layer_norm" in name for name in before)  # its results come after the copy
    assert not {"scatter", "scatter_add", "index_put"} & {*names}
    assert names.count("new_zeros") == 2
    assert ("Filled: add", 256) in made  # the module's own sum
    assert [size for name, size in made if name == "sums in float32"] == [4 * 2 * 16 * 4]
    assert [size for name, size in made if name == "less the largest"] == [4 * 2 * 3 * 2]


def counted_by_pytorch(func: Any, args: tuple[Any, ...], results: tuple[torch.Tensor, ...]) -> int:
    """The FLOPs that `torch.utils.flop_counter` counts."""
    counted: int = flop_registry[func._overloadpacket](
        *args, out_val=results[0] if len(results) == 1 else results
    )
    return counted


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


QUERY, KEY, VALUE = empty(2, 8, 10, 16), empty(2, 2, 12, 16), empty(2, 2, 12, 6)
ATTENDED = empty(2, 8, 10, 6)


@pytest.mark.parametrize(
    "func, args, result",
    [
        (ATEN.mm.default, (empty(2, 3), empty(3, 4)), empty(2, 4)),
        (ATEN.addmm.default, (empty(4), empty(2, 3), empty(3, 4)), empty(2, 4)),
        (ATEN.bmm.default, (empty(5, 2, 3), empty(5, 3, 4)), empty(5, 2, 4)),
        (ATEN.baddbmm.default, (empty(5, 2, 4), empty(5, 2, 3), empty(5, 3, 4)), empty(5, 2, 4)),
        (ATEN._scaled_mm.default, (empty(2, 3), empty(3, 4), empty(), empty()), empty(2, 4)),
        (ATEN._scaled_dot_product_flash_attention.default, (QUERY, KEY, VALUE), ATTENDED),
        (ATEN._scaled_dot_product_flash_attention_backward.default, (ATTENDED, QUERY, KEY, VALUE), QUERY),
        (ATEN._scaled_dot_product_efficient_attention.default, (QUERY, KEY, VALUE), ATTENDED),
        (ATEN._scaled_dot_product_cudnn_attention_backward.default, (ATTENDED, QUERY, KEY, VALUE), QUERY),
    ],
    ids=str,
)
def test_flops_follow_from_operands_as_pytorch_counts_them(func, args, result):
    (one,) = computed_of(func, args, {}, (result,), result)
    assert (flops_of(one.kind, one.operands) if one.operands else one.flops) == counted_by_pytorch(
        func, args, (result,)
    )
    assert one.kind is not ComputeKind.UNKNOWN


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("n_dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolution_has_the_flops_that_pytorch_counts_and_its_gradients_as_many(
    n_dims, transposed, groups
):
    image, weight = (
        empty(3, 4, *[11] * n_dims),
        empty(*((4, 3) if transposed else (6, 4 // groups)), *[3] * n_dims),
    )
    how = [2] * n_dims, [1] * n_dims, [1] * n_dims, transposed, [1 * transposed] * n_dims, groups
    args = image, weight, None, *how
    output = ATEN.convolution.default(*args)
    (one,) = computed_of(ATEN.convolution.default, args, {}, (output,), output)
    flops = flops_of(one.kind, one.operands)
    assert flops == counted_by_pytorch(ATEN.convolution.default, args, (output,))
    backward = ATEN.convolution_backward.default
    for mask in ([True, True, False], [True, False, True], [False, True, True], [False, False, True]):
        given = output, image, weight, [output.shape[1]], *how, mask
        out = backward(*given)
        gradients = computed_of(backward, given, {}, tensors(out), out)
        asked = [one for one, is_asked in zip((image, weight), mask, strict=False) if is_asked]
        assert [one.shape for one in gradients] == [one.shape for one in asked]
        assert [flops_of(one.kind, one.operands) for one in gradients] == [flops] * len(asked)
        if groups == 1:  # of several groups it counts the weight's gradient as if all channels met
            assert len(asked) * flops == counted_by_pytorch(backward, given, out)


def test_a_product_of_groups_has_two_flops_for_each_row_and_element_of_its_matrix():
    rows, matrices, columns = (7, 16), (4, 16, 24), (16, 24)
    kind = ComputeKind.GROUPED_MM
    assert flops_of(kind, (rows, matrices)) == 2 * 7 * 16 * 24
    assert flops_of(kind, ((16, 7), (7, 24))) == 2 * 7 * 16 * 24
    assert flops_of(kind, ((4, 7, 16), columns)) == 2 * 7 * 16 * 24
    assert flops_of(kind, ((4, 7, 16), matrices)) == 4 * 2 * 7 * 16 * 24


def test_floats_that_follow_from_positions_are_known():
    traced = on_cpu(OnDistances(), torch.ones(6, 8), precisions=["fp32"])
    assert memplan.estimate(traced, seq_len=1, precision="fp32").worst.states.grads_bytes == 72 * 4


def test_weights_of_integers_are_held_as_they_are():
    module = with_tensor("parameter", torch.ones(1000, dtype=torch.int8))
    traced = on_cpu(module, torch.ones(4, 8), precisions=["fp32"])
    e = memplan.estimate(traced, seq_len=1, precision="fp32")
    assert e.worst.states.weights_bytes == 1000 + (8 * 8 + 8) * 4
    assert e.worst.states.grads_bytes == (8 * 8 + 8) * 4


def test_angles_that_are_complex_are_held_as_a_buffer():
    class Rotated(Twice):
        angles: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("angles", torch.ones(4, dtype=torch.complex64))

        def forward(self, x):
            pairs = torch.view_as_complex(self.w(x).unflatten(-1, (4, 2)))
            return torch.view_as_real(pairs * self.angles).sum()

    traced = on_cpu(Rotated(), torch.ones(4, 8), precisions=["fp32"])
    e = memplan.estimate(traced, seq_len=1, precision="fp32", micro_batch=16)
    assert {(b.n_bytes, b.dtype.name) for b in e.worst.alive if b.name == "angles"} == {(32, "complex64")}
    assert max(b.n_bytes for b in e.worst.alive if b.dtype.name == "complex64") == 16 * 4 * 8


def test_what_hooks_of_modules_do_is_part_of_the_module():
    class Doubled(nn.Linear):
        def forward(self, x):
            return super().forward(x * 2) * 2

    by_hooks = nn.Linear(8, 8)
    by_hooks.register_forward_pre_hook(lambda _, arguments: (arguments[0] * 2,))
    by_hooks.register_forward_hook(lambda _, arguments, output: output * 2)
    by_hooks.register_full_backward_hook(lambda _, grad_input, grad_output: None)
    peaks = [
        memplan.estimate(
            on_cpu(nn.Sequential(nn.Linear(8, 8), module, nn.ReLU()), torch.ones(4, 8), loss=torch.sum),
            seq_len=1,
            micro_batch=256,
        ).peak.total_bytes
        for module in (by_hooks, Doubled(8, 8), nn.Linear(8, 8))
    ]
    assert peaks[0] == peaks[1] > peaks[2]


class Shared(nn.Module):
    """Layers that share one weight; a buffer larger than all weights; a hook."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(6)])
        for layer in self.layers:
            layer.weight = self.layers[0].weight
        self.register_buffer("table", torch.zeros(1000, 1000))
        self.layers[0].register_forward_hook(lambda module, inputs, output: output * 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return (x + self.table[0, 0]).sum()


def test_a_shared_weight_is_counted_once_and_a_buffer_is_held():
    traced = on_cpu(Shared(), torch.ones(4, 8), precisions=["fp32"])
    assert (traced.n_layers, traced.n_parameters, traced.tied) == (0, 64, True)
    e = memplan.estimate(traced, seq_len=1, precision="fp32", dp=2)
    assert e.worst.states.weights_bytes == 256
    assert {b.n_bytes for b in e.worst.alive if b.name == "table"} == {4_000_000}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.trained = nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.relu(self.frozen(x)) + self.trained(x)


def adapted(n_layers: int) -> nn.Module:
    """A frozen layer, then blocks that are frozen in part."""
    inlet = nn.Linear(16, 16).requires_grad_(False)
    return nn.Sequential(inlet, nn.Sequential(*[Layer() for _ in range(n_layers)]))


def squares(output: torch.Tensor) -> torch.Tensor:
    return (output * output).sum()


@pytest.mark.parametrize(
    "plan", [{}, {"dp": 2}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 2}, {"dp": 2, "zero": 3}], ids=str
)
def test_what_is_frozen_has_weights_alone(plan):
    traced = on_cpu(adapted(6), torch.ones(4, 16), loss=squares, precisions=["fp32"])
    assert traced.n_layers == 6
    assert traced.frozen == ("0.weight", "0.bias", "1.*.frozen.weight", "1.*.frozen.bias")
    e = memplan.estimate(traced, seq_len=1, precision="fp32", **plan)
    shards = 2 if plan.get("zero", 0) >= 2 else 1
    trained_bytes = 6 * (16 * 16 + 16) * 4
    assert e.worst.states.weights_bytes == (13 * (16 * 16 + 16) * 4) // shards
    assert e.worst.states.grads_bytes == trained_bytes // shards
    moments = 2 * trained_bytes // (2 if plan.get("zero") else 1)
    assert moments <= e.worst.states.optimizer_bytes <= moments + 12 * 4
    reduced = sum(c.payload_bytes for c in e.collectives if c.kind in ("all_reduce", "reduce_scatter"))
    assert reduced == (trained_bytes if plan else 0)
    assert not [b for b in e.worst.alive if "frozen" in b.name and b.kind in ("grads", "optimizer")]


def test_a_pipeline_whose_first_modules_are_frozen():
    module = nn.Sequential(*adapted(6).children(), nn.Linear(16, 4))
    traced = on_cpu(module, torch.ones(4, 16), loss=squares, precisions=["fp32"])
    plan: dict[str, Any] = {"seq_len": 1, "precision": "fp32", "micro_batch": 64}
    e = memplan.estimate(traced, pp=3, global_batch=256, **plan)
    first, middle, last = e.stages
    trained_bytes = 2 * (16 * 16 + 16) * 4
    assert [s.states.grads_bytes for s in e.stages] == [trained_bytes, trained_bytes, trained_bytes + 272]
    for stage in e.stages:
        assert stage.record.step.net_bytes == stage.states.grads_bytes
    sent = [[c.what for c in stage.collectives if c.kind == "send"] for stage in (first, middle, last)]
    assert sent == [["activations"], ["activations", "activation gradients"], ["activation gradients"]]


def test_frozen_ends_of_their_own_in_a_pipeline_are_refused():
    module = nn.Sequential(*adapted(6).children(), nn.Linear(16, 4))
    traced = on_cpu(module, torch.ones(4, 16), loss=squares, precisions=["fp32"])
    plan: dict[str, Any] = {"pp": 2, "dp": 2, "zero": 3, "global_batch": 8, "fsdp_units": "block+ends"}
    with pytest.raises(MissingRule, match="frozen modules before the blocks"):
        memplan.estimate(traced, seq_len=1, precision="fp32", **plan)


def test_blocks_are_run_once_and_then_the_first_of_them(monkeypatch):
    ran: list[nn.Module] = []
    forward = Layer.forward

    def counted(self, x):
        ran.append(self)
        return forward(self, x)

    monkeypatch.setattr(Layer, "forward", counted)
    few, many = (on_cpu(adapted(n), torch.ones(4, 16), loss=squares, name="x") for n in (5, 60))
    assert len(ran) < 2 * 60 + 8 * len(many.recordings) * 4
    assert many.recordings == few.recordings
    assert (few.n_layers, many.n_layers) == (5, 60)


def test_a_module_that_needs_all_its_blocks_runs_them_all():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(7)])

        def forward(self, x):
            outputs = []
            for i in range(7):
                x = self.layers[i](x)
                outputs.append(x)
            return torch.cat(outputs).sum()

    traced = on_cpu(Counting(), torch.ones(4, 8), precisions=["fp32"])
    named = {one.name: one for one in traced.recordings[next(iter(traced.recordings))].buffers}
    assert named["Counting: cat"].n_bytes == (Term(224, 1, 0),)


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(InvalidValue, match="PyTorch sees no GPU"):
        on_cpu(Twice(), torch.ones(4, 8), device="cuda", executed=True)
    with pytest.raises(InvalidValue, match="executed=True runs the module on a GPU"):
        on_cpu(Twice(), torch.ones(4, 8), executed=True)
    with pytest.raises(memplan.MemplanError, match="unknown device 'tpu'"):
        on_cpu(Twice(), torch.ones(4, 8), device=cast(Any, "tpu"))


def test_a_module_needs_an_example():
    with pytest.raises(InvalidValue, match="example_inputs"):
        memplan.estimate(Twice())


def test_a_size_that_follows_from_no_rule_holds_for_itself_only():
    class Odd(Twice):
        def forward(self, x):
            return self.w(x[: int(len(x) ** 0.5)]).sum()

    traced = on_cpu(Odd(), torch.ones(9, 8), precisions=["fp32"])
    assert traced.limits == (9, 1)
    assert memplan.estimate(traced, micro_batch=9, seq_len=1, precision="fp32").peak.total_bytes > 0
    with pytest.raises(MissingRule, match="micro-batch of 9"):
        memplan.estimate(traced, micro_batch=4, seq_len=1, precision="fp32")


def test_a_loop_over_the_sequence_holds_for_its_length_and_any_batch():
    class Unrolled(Twice):
        def forward(self, x):
            state = x.new_zeros(len(x), 8, dtype=torch.float32)
            for _ in range(x.shape[1]):
                state = self.w(state).relu()
            return state.sum()

    traced = on_cpu(Unrolled(), torch.zeros(2, 6, dtype=torch.int64), precisions=["fp32"])
    assert traced.limits == (0, 6)
    peaks = [
        memplan.estimate(traced, micro_batch=n, seq_len=6, precision="fp32").peak.total_bytes
        for n in (64, 128)
    ]
    assert peaks[0] < peaks[1] < 2 * peaks[0]
    with pytest.raises(MissingRule, match="seq_len=6"):
        memplan.estimate(traced, seq_len=8, precision="fp32")


def changed(text: str, path: list[Any], value: object) -> str:
    data = json.loads(text)
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return json.dumps(data, separators=(",", ":"))


@pytest.mark.parametrize(
    "path, value",
    [
        (["name"], 3),
        (["device"], "abacus"),
        (["n_blocks"], -1),
        (["n_blocks"], True),
        (["limits"], [1]),
        (["recordings"], []),
        (["recordings", 0, "run"], ["float32"]),
        (["recordings", 0, "run", 0], "float7"),
        (["buffers", 0], ["x"]),
        (["buffers", 0, 3], [[1, 99]]),
        (["buffers", 0, 3], "many"),
        (["buffers", 0, 4], "weightless"),
        (["recordings", 0, "parts", "embed", 0], 100000),
        (["recordings", 0, "parts", "embed", 0], [0, "w2"]),
        (["recordings", 0, "parts", "embed"], None),
        (["recordings", 0, "parts", "embed", 0], -100000),
        (["recordings", 0, "buffers", 0], 100000),
        (["recordings", 0, "boundary"], [0]),
        (["recordings", 0, "boundary", 2], 1),
        (["recordings", 0, "cut"], 1),
        (["recordings", 0, "cut"], [0]),
        (["recordings", 0, "ends"], [[0, 1], [0, 1], 0]),
        (["recordings", 0, "ends"], [[0, 1], [0, -1], 0, 0]),
        (["recordings", 0, "parts", "embed", -2], ["forward", 100000]),
        (["recordings", 0, "parts", "embed", -2], ["sideways", 0]),
        (["computations"], None),
        (["computations", 0], ["mm", [], [4], "float32"]),
        (["computations", 0, 0], "magic"),
        (["computations", 0, 0], "bmm"),
        (["computations", 0, 0], "unknown"),
        (["computations", 0, 1], [[4, 8]]),
        (["computations", 0, 1], [[4, 8], 8]),
        (["computations", 0, 1], [[4, 8], [8, [[1, 99]]]]),
        (["computations", 0, 3], "float7"),
        (["computations", 0], ["mm", [[4, 8], [8, 8]], [4, 8], "float32", 512]),
        (["computations", 0], ["unknown", [], [4, 8], "float32", "many"]),
        (["frozen"], None),
        (["frozen"], ["w.weight"]),
        (["embed_parameters", 0], ["w", "shape", "float32"]),
    ],
    ids=str,
)
def test_a_strangers_file_is_refused(tmp_path, path, value):
    traced = on_cpu(Twice(), torch.ones(4, 8), precisions=["fp32"])
    traced.save(tmp_path / "t.json")
    (tmp_path / "t.json").write_text(changed((tmp_path / "t.json").read_text(), path, value))
    with pytest.raises(memplan.MemplanError, match=r"t\.json: "):
        model_from_trace(tmp_path / "t.json")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format":"memplan trace 2"}',
        '{"format":"memplan trace 3"}',
        '{"format":"memplan trace 4"}',
        "[" * 100_000,
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(InvalidValue, match=r"t\.json: "):
        model_from_trace(tmp_path / "t.json")


def test_the_command_line_traces_what_a_function_returns(tmp_path, monkeypatch):
    from click.testing import CliRunner

    from memplan.cli import commands

    (tmp_path / "mine.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Sequential(torch.nn.Linear(8, 1)), torch.ones(4, 8)\n"
        "def whole():\n    module, x = make()\n"
        "    return {'module': module, 'example_inputs': x, 'loss': torch.sum}\n"
    )
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    written = run(commands, ["trace", "mine:whole", "--out", "t.json"])
    assert written.exit_code == 0, written.output
    for model in ("mine:whole", "t.json"):
        shown = run(commands, ["estimate", model, "--seq-len", "1", "--dp", "2", "--ledger"])
        assert shown.exit_code == 0, shown.output
        assert "0.weight" in shown.output
    assert "no loss" in run(commands, ["estimate", "mine:make"]).output
    assert "package.module:factory" in run(commands, ["estimate", "nothing:at_all"]).output
    assert isinstance(model_from_trace("t.json"), TracedModel)


class WithTables(nn.Module):
    """Blocks that are called with a float32 table, as those of OLMo 2 are with angles."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.w = nn.LayerNorm(64), nn.Linear(64, 64)

        def forward(self, x, table):
            return x + (self.w(self.norm(x)) * table).to(x.dtype)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.blocks = nn.ModuleList([self.Block() for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 100)

    def forward(self, tokens):
        x, table = self.embedding(tokens), torch.ones(tokens.shape[1], 64)
        for block in self.blocks:
            x = block(x, table)
        return self.head(self.norm(x))


def test_fsdp2_casts_what_blocks_are_called_with(tmp_path):
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    traced = on_cpu(WithTables(), tokens, targets=tokens)
    casts = {(run.weights, run.autocast) for run in traced.recordings if run.units}
    assert casts == {("bfloat16", "")}
    traced.save(tmp_path / "tables.json")
    assert model_from_trace(tmp_path / "tables.json").recordings == traced.recordings
    sharded: dict[str, Any] = {"dp": 2, "zero": 3, "micro_batch": 4, "seq_len": 64, "device": "cpu"}
    for units, dtype in (({}, "bfloat16"), ({"fsdp_units": "model"}, "float32")):
        step = memplan.estimate(traced, **sharded, **cast(Any, units)).worst.record.step
        made = {event.buffer for _, event in unrolled(step) if event.buffer.name.endswith(": mul")}
        assert {buffer.dtype.name for buffer in made} == {dtype}


class Asks(nn.Module):
    """Casts images to the type of a weight outside the weight's unit, as transformers' ViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(96, 64)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(4)])
        self.head = nn.Linear(64, 10)

    def forward(self, images):
        x = self.embedding(images.to(self.embedding.weight.dtype))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(1))


def test_weights_have_their_shards_type_outside_their_unit():
    images, targets = torch.zeros(2, 8, 96), torch.zeros(2, dtype=torch.int64)
    traced = on_cpu(Asks(), images, targets=targets, precisions=["bf16-mixed"])
    assert {run.units for run in traced.recordings} == {"", "block+ends"}
    made = {}
    for units in ("block", "block+ends"):
        plan: dict[str, Any] = {"dp": 2, "zero": 3, "precision": "bf16-mixed", "fsdp_units": units}
        step = memplan.estimate(traced, **plan, micro_batch=4, device="cpu").worst.record.step
        copies = {
            e.buffer for _, e in unrolled(step) if "_to_copy" in e.buffer.name and len(e.buffer.shape) == 3
        }
        made[units] = sorted((copied.dtype.name, copied.shape) for copied in copies)
    assert made["block"] == [("bfloat16", (4, 8, 96))]
    assert made["block+ends"] == [
        ("bfloat16", (4, 8, 96)), ("bfloat16", (4, 8, 96)), ("float32", (4, 8, 96))
    ]  # fmt: skip
    plan = {"dp": 2, "pp": 2, "zero": 3, "precision": "bf16-mixed", "fsdp_units": "block+ends"}
    with pytest.raises(MissingRule, match="asks for the type of weights"):
        memplan.estimate(traced, **plan, global_batch=4, device="cpu")


def test_nothing_is_cast_where_blocks_are_called_with_one_type():
    module = Transformer(FAMILIES["gpt"], range(4), seq_len=96)
    tokens = torch.zeros(2, 96, dtype=torch.int64)
    traced = on_cpu(module, tokens, targets=tokens, loss=token_loss, precisions=["bf16-mixed"])
    assert not any(run.units for run in traced.recordings)


def test_rows_taken_by_numbers_are_asked_for_once_and_rows_taken_by_a_mask_anew():
    shapes = Shapes()
    with shapes.mode:
        rows, numbers = torch.empty(6, 4), torch.zeros(5, dtype=torch.int64)
        for places, is_kept in ((numbers, True), (torch.ones(6, dtype=torch.bool), False)):
            taken = Operation(ATEN.index.Tensor, (), (rows, [places]), {})
            assert (shapes.memo(taken) is shapes.memo(taken)) is is_kept
    by_numbers = Operation(ATEN.index.Tensor, (), (rows, [numbers]), {})
    memo = shapes.memo(by_numbers)
    for _ in range(2):
        assert shapes.result(by_numbers, memo).shape == (5, 4)
        assert memo.results is not None


class Chunked(nn.Module):
    """A layer that pads sequences to whole chunks of 256 tokens, as scans of state-space models do."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(64, 32), nn.Linear(32, 64)

    def forward(self, ids):
        x = self.tokens(ids)
        padded = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 256)).relu()
        return self.out(padded[:, : x.shape[1]]).square().mean()


def test_rules_that_short_sequences_agree_on_are_checked_at_a_longer_one():
    """48, 80 and 112 tokens are all padded to 256, so that their sizes look as if they followed no length."""
    for length in (300, 2048):
        traced = memplan.trace(Chunked(), torch.zeros(2, length, dtype=torch.int64), device="cpu")
        assert traced.limits == (0, length)


class _Normalised(nn.Module):
    """A linear and a batch norm under a name."""

    def __init__(self, name: str):
        super().__init__()
        self.linear, self.name = nn.Linear(8, 8), name
        self.add_module(name, nn.BatchNorm1d(8))

    def forward(self, x):
        return self.get_submodule(self.name)(self.linear(x)).sum()


def test_ddp_broadcasts_buffers_of_a_module_that_is_named_reference():
    """Only the reference model of TRL's DPOTrainer, which has this name too, is not wrapped by DDP."""
    sent = []
    for name in ("reference", "other"):
        model = memplan.trace(_Normalised(name), torch.randn(4, 8), device="cpu")
        asked: dict[str, Any] = {"dp": 2, "micro_batch": 2, "global_batch": 4, "device": "cpu"}
        found = memplan.estimate(model, precision="fp32", **asked).collectives
        sent.append([(one.kind, one.payload_bytes, one.calls) for one in found])
    assert sent[0] == sent[1]
    assert ("broadcast", 2 * 8 * 4, 1) in sent[0]
