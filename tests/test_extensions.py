"""What another package can add, and where it then appears: here all of it is in this one file."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, final

import pytest
from click.testing import CliRunner

import memplan
from memplan import registry
from memplan.cli import commands
from memplan.device import Device
from memplan.engines.base import ENGINES, Confirmation, Costs, DataParallelism, Engine, PartCosts, RankRecord
from memplan.engines.options import plan_of
from memplan.errors import ContradictoryEstimate, InvalidValue, MissingRule, PlanRefused, UnknownName
from memplan.estimate import estimate_plan
from memplan.fields import Choice, Count, described
from memplan.memory import Alive
from memplan.mesh import Axis
from memplan.models import Decoder, Family, Layers, Model, parameter_count, preset, resolve
from memplan.models.config import Config
from memplan.models.families import Reader
from memplan.ops import embedding, gelu, linear, redistribute, rms_norm
from memplan.orders import Loop, listed
from memplan.placements import Replicate
from memplan.plan import Plan, Rank, stage_layers
from memplan.precisions import Precision
from memplan.record import (
    COMPUTE,
    Alloc,
    Collective,
    Compute,
    ComputeKind,
    Free,
    Stretch,
    WaitStream,
    chain,
    events,
    passed,
    repeated,
)
from memplan.replay.peaks import replayed
from memplan.replay.program import AllocatorProgram
from memplan.schedules import Schedule
from memplan.shapes import BF16, FP32, buffer_of
from memplan.tables import estimate_text, verdict_text
from memplan.tape import Backend, Tensor
from memplan.testing import check_laws, check_ways_out
from memplan.time.step import Roofline
from validate.cases import Case, title

POINTS = """[memplan.axes]
slice = test_extensions:SLICE

[memplan.engines]
toy = test_extensions:TOY
broken = test_extensions:POINTS

[memplan.models]
mixed = test_extensions:MIXED

[memplan.precisions]
toy-reduce-fp32 = test_extensions:WIDE_REDUCTION
fp32-master = test_extensions:WIDE_GRADIENTS

[memplan.schedules]
flood = test_extensions:FLOOD
broken = test_extensions:POINTS
"""
"""The entry points of a package; the module is this one, however pytest has imported it."""


def _in_fours(model: Model, plan: Plan) -> None:
    if plan.dp % 4 and plan.dp > 1:
        raise PlanRefused(f"dp={plan.dp}: the toy reduces in fours; use dp=4.", kind="dp not in fours")


def _in_pairs(model: Model, plan: Plan) -> None:
    if plan.micro_batch % 2:
        raise PlanRefused(f"micro_batch={plan.micro_batch}: use pairs, such as 2.", kind="odd micro-batches")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyOptions:
    """The toy's own options."""

    spare_blocks: int = described(0, Count(text="Blocks whose output is kept twice", least=0, word="spare"))
    style: str = described("plain", Choice(text="How it is played", choices=("plain", "loud")))


SLICE = Axis(text="Ranks that hold slices of each weight", waits="tp", word="sl")
"""An axis between dp and tp."""


class ToyEngine(Engine):
    """A framework of 16 bits that keeps one tensor of each block and reduces at the end.

    Ranks along `slice` divide the weights, and gather them whenever a block is computed.
    """

    name = "toy"
    plays = "a toy"
    axes = "dp", "slice", "tp"
    gives_bounds = True
    options = ToyOptions
    refusals = (_in_fours,)

    def confirmed_on(self, device: Device) -> Confirmation:
        return "unconfirmed"

    def play(self, model: Model, plan: Plan, device: Device) -> Iterator[RankRecord]:
        yield self.play_rank(model, plan, Rank(), device, None)

    def play_rank(
        self, model: Model, plan: Plan, rank: Rank, device: Device, backend: Backend | None
    ) -> RankRecord:
        weights = buffer_of("all weights", (self._elements(model, plan),), BF16, "weights")
        grads = buffer_of("all gradients", weights.shape, BF16, "grads")
        shape = plan.micro_batch, plan.seq_len, model.d_model
        output = buffer_of("output of a block", shape, BF16, "activations")
        options = plan.options or ToyOptions()
        spare = buffer_of("spare outputs", (options.spare_blocks, *shape), BF16, "activations")
        flops = 2 * weights.shape[0] * plan.micro_batch * plan.seq_len // model.n_blocks
        computed = Compute(kind=ComputeKind.UNKNOWN, phase="forward", flops=flops, shape=shape, dtype=BF16)
        back = replace(computed, phase="backward", flops=2 * flops)
        gathered = Collective(
            kind="all_gather", axis="slice", what="weights of a block", stream="gather",
            payload_bytes=weights.n_bytes * plan.mesh.size("slice") // model.n_blocks,
        )  # fmt: skip
        sliced = plan.mesh.size("slice") > 1
        forward = events("block", [*([gathered] if sliced else []), Alloc(output), computed])
        steps: list[Stretch] = [
            passed(0, "forward", repeated(forward, model.n_blocks)),
            passed(
                0, "backward", repeated(events("backward of a block", [back, Free(output)]), model.n_blocks)
            ),
        ]
        among = "dp x slice" if sliced else "dp"
        reduced = Collective(kind="all_reduce", axis=among, what="all gradients", payload_bytes=grads.n_bytes)
        step = chain(
            "step",
            events("gradients", [Alloc(grads), Alloc(spare)]),
            repeated(chain("micro-batch", *steps), plan.n_micro_batches),
            events(
                "reduction", [WaitStream(COMPUTE, "gather"), *([reduced] if plan.dp > 1 else []), Free(spare)]
            ),
        )
        return RankRecord(
            rank=rank,
            layers=(stage_layers(model.n_blocks, plan, 0),),
            rest=Alive({weights: 1}),
            step=step,
            grads=Alive({grads: 1}),
            program=lambda: AllocatorProgram(setup=(Alloc(weights),), step=step),
        )

    def _elements(self, model: Model, plan: Plan) -> int:
        n_parts: int = plan.tp * plan.mesh.size("slice")
        return parameter_count(model) // n_parts

    def part_costs(self, model: Model, plan: Plan, device: Device) -> PartCosts:
        """All weights in the embedding: the toy's blocks have shares of them."""
        n, size = self._elements(model, plan), plan.micro_batch * plan.seq_len
        nothing = Costs(elements=0, computed=(), backward=(), sent_bytes=0, saved_bytes=0)
        flops = 2 * n * size // model.n_blocks
        each = (Compute(kind=ComputeKind.UNKNOWN, phase="forward", flops=flops, shape=(), dtype=BF16),)
        back = (replace(each[0], phase="backward", flops=2 * flops),)
        block = nothing._replace(computed=each, backward=back, saved_bytes=2 * size * model.d_model)
        blocks = dict.fromkeys(model.kinds, block)
        return PartCosts(
            embedding=nothing._replace(elements=n), head=nothing, blocks=blocks, recomputed=blocks,
            boundary_bytes=0, received_bytes=0,
        )  # fmt: skip

    def data_parallelism(
        self, plan: Plan, elements: Any, block_elements: Any, single: Any
    ) -> DataParallelism:
        gathered = plan.n_micro_batches * 2 * elements * (plan.mesh.size("slice") - 1)
        return DataParallelism(
            waits={}, reductions={}, gathers={"slice": gathered}, reducing=0.0, states_bytes=4 * elements,
            unsharded_bytes=0.0, grads_bytes=0.0, updated_bytes=elements / 2,
        )  # fmt: skip


TOY = ToyEngine()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed(Model):
    """Every `every`-th block has a feed-forward layer `widening` times as wide, and none of its own norm."""

    family: ClassVar[str] = "mixed"
    code: ClassVar[str] = "a toy"

    n_layers: int
    every: int
    widening: int

    @property
    def layers(self) -> tuple[Layers, ...]:
        whole, left = divmod(self.n_layers, self.every)
        found = [Layers("narrow", self.every - 1), Layers("wide", 1)] * whole + [Layers("narrow", left)]
        return tuple(run for run in found if run.n)

    def embed(self, tokens: Tensor) -> Tensor:
        return embedding(tokens, "table", 320, self.d_model)

    def block(self, x: Tensor, kind: str) -> Tensor:
        h = redistribute(x if kind == "wide" else rms_norm(x, "norm"), "tp", Replicate())
        d_ff = self.d_model * (self.widening if kind == "wide" else 1)
        h = gelu(linear(h, "up", d_ff, bias=False, split="columns"))
        return x + linear(h, "down", self.d_model, bias=False, split="rows")

    def head(self, x: Tensor) -> Tensor:
        whole = redistribute(rms_norm(x, "norm"), "tp", Replicate())
        return linear(whole, "output", 320, bias=False, split="columns")


def _read_mixed(config: Config, name: str) -> Mixed:
    return Mixed(
        name=name,
        d_model=config.count("width", 64),
        max_seq_len=128,
        n_layers=config.count("depth", 7),
        every=3,
        widening=config.count("widening", 4),
    )


MIXED = Family(
    implementations={"reference": Mixed},
    readers={"mixed": Reader("MixedForCausalLM", _read_mixed)},
    presets={
        "mixed-tiny": {
            "d_model": 64, "max_seq_len": 128, "n_layers": 7, "every": 3, "widening": 4,
            "source": "made up", "retrieved": "today",
        }
    },
)  # fmt: skip


def _flood(pp: int, rank: int, v: int, m: int) -> Loop:
    """All forward passes of all of a rank's stages, then all backward passes."""
    order = " ".join([f"F{i}" for i in range(v)])
    back = " ".join([f"B{i}" for i in reversed(range(v))])
    return Loop((Loop(listed(order), m), Loop(listed(back), m)))


FLOOD = Schedule(
    order=_flood,
    runs_as="test_extensions:ScheduleFlood",
    micro_batches=lambda pp, v, m: (max(m, 2), f"a flood takes at least 2 micro-batches, not {m}"),
)


WIDE_REDUCTION = Precision(
    stored=BF16, compute=BF16, gather=BF16, reduce=FP32, accumulate=BF16, matmul="bf16"
)
"""All in bfloat16, but for the reduction: `MixedPrecisionPolicy(reduce_dtype=torch.float32)`."""

WIDE_GRADIENTS = Precision(
    stored=BF16, compute=BF16, gather=BF16, reduce=FP32, accumulate=FP32, matmul="bf16"
)
"""Gradients kept in float32 beside bfloat16 weights, as Megatron keeps them and PyTorch does not."""


@pytest.fixture
def installed(tmp_path, monkeypatch) -> Iterator[None]:
    """This file as if it were an installed package that registers its entry points."""
    info = tmp_path / "site" / "toy-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setitem(sys.modules, "test_extensions", sys.modules[__name__])
    forget()
    yield
    forget()


def forget() -> None:
    """What registries have found among installed packages."""
    registry.installed.cache_clear()
    registry.loaded.cache_clear()


ASKED: dict[str, Any] = {"cluster": "8xh100-sxm", "global_batch": 16, "seq_len": 512}


def test_an_engine_is_known_once_it_is_installed(installed):
    own = ("torch", "deepspeed", "fairscale", "colossalai", "megatron", "textbook")
    assert ENGINES.names() == (*own, "broken", "toy")
    assert ENGINES.named("toy") is TOY


def test_an_unknown_engine_is_refused_with_the_names_that_are_known():
    known = "colossalai, deepspeed, fairscale, megatron, textbook, torch"
    with pytest.raises(UnknownName, match=rf"unknown engine 'toy'.* Known: {known}\.$"):
        memplan.estimate("gpt2", engine="toy")


def test_what_is_no_engine_is_refused(installed):
    with pytest.raises(InvalidValue, match=r"engine 'broken' is .* must be a memplan\.engines\.base\.Engine"):
        memplan.estimate("gpt2", engine="broken")


def test_an_engines_plan_is_estimated_by_folds_over_its_record(installed):
    e = memplan.estimate("gpt2", engine="toy", **ASKED)
    n_bytes = 2 * e.n_parameters
    output_bytes = 2 * 512 * e.model.d_model
    assert e.peak.weights_bytes == e.peak.grads_bytes == n_bytes
    assert e.peak.activations_bytes == e.model.n_blocks * output_bytes
    assert [(c.kind, c.calls, c.payload_bytes) for c in e.collectives] == [("all_reduce", 1, n_bytes)]
    assert e.collectives[0].wire_bytes == 2 * n_bytes * 7 // 8
    assert e.worst.flops == pytest.approx(2 * e.n_parameters * 512 * 2, rel=1e-6)
    assert e.verdict == "fits"
    assert e.step_s > 0
    assert "engine=toy" in str(e)
    assert "Bytes by CUDA's rules, not checked for this GPU.\n" in str(e)


def test_an_engines_refusals_are_asked(installed):
    with pytest.raises(PlanRefused, match=r"pp=2: engine='toy' divides nothing along pp; use pp=1\."):
        memplan.estimate("gpt2", engine="toy", pp=2, **ASKED)
    with pytest.raises(PlanRefused, match="the toy reduces in fours"):
        memplan.estimate("gpt2", engine="toy", dp=2, tp=4, **ASKED)


def test_an_engines_rules_are_asked_of_the_numbers_that_a_search_tries(installed, monkeypatch):
    """Of as many ranks and sequences as a plan has, and not of stand-ins for them."""
    job: dict[str, Any] = {"engine": "toy", "tp": (1, 2, 4), "slice": 1, "keep": None, **ASKED}
    found = memplan.search("gpt2", **job)
    assert set(found["dp"][found["verdict"] == "fits"]) == {4, 8}
    assert set(found["dp"][found["verdict"] == "refused"]) >= {2}
    assert set(found["micro_batch"][found["verdict"] == "fits"]) == {1, 2, 4}
    monkeypatch.setattr(ToyEngine, "refusals", (_in_pairs,))
    paired = memplan.search("gpt2", **job)
    assert set(paired["micro_batch"][paired["verdict"] == "fits"]) == {2, 4, 8}


def test_an_engine_is_held_to_the_laws(installed):
    plans: list[dict[str, Any]] = [{}, {"tp": 2}, {"micro_batch": 2}, {"spare_blocks": 2}]
    for plan in plans:
        check_laws(memplan.estimate("gpt2", engine="toy", **ASKED, **plan))
    for plan in [{"pp": 2}, {"dp": 2, "tp": 4}, {"zero": 3, "dp": 8}]:
        check_ways_out(preset("gpt2"), plan_of(engine="toy", **plan))


SLICED: dict[str, Any] = {"engine": "toy", "slice": 2, **ASKED}


def test_an_axis_is_estimated_timed_and_printed(installed):
    """A row of the table and an engine that knows it: nothing else has heard of it."""
    e, whole = memplan.estimate("gpt2", **SLICED), memplan.estimate("gpt2", engine="toy", **ASKED)
    assert (e.plan.mesh.size("slice"), e.plan.dp, e.plan.world_size, e.plan.n_replicas) == (2, 4, 8, 4)
    assert e.plan.place(3).others == (("slice", 1),)
    assert e.peak.weights_bytes == whole.peak.weights_bytes // 2
    sent = {c.axis: (c.kind, c.calls, c.payload_bytes, c.wire_bytes) for c in e.collectives}
    blocks = e.plan.n_micro_batches * e.model.n_blocks
    each_bytes = 2 * e.n_parameters // e.model.n_blocks
    assert sent["slice"] == ("all_gather", blocks, blocks * each_bytes, blocks * each_bytes // 2)
    assert sent["dp x slice"] == ("all_reduce", 1, e.n_parameters, 2 * e.n_parameters * 7 // 8)
    assert "pp=1 x dp=4 x slice=2 x tp=1, zero=0, precision=" in " ".join(str(e).split())
    assert "all_gather  slice" in estimate_text(e, details=True)
    slow = replace(e.cluster, intra_node=replace(e.cluster.intra_node, bytes_per_s=1e6))
    late = memplan.estimate("gpt2", **SLICED | {"cluster": slow})
    expected_s = sum(wire_bytes for _, _, _, wire_bytes in sent.values()) / 1e6
    as_stated = [replace(each, time_model=Roofline(efficiency=0.5)) for each in (late, e)]
    assert as_stated[0].step_s - as_stated[1].step_s == pytest.approx(expected_s, rel=0.01)
    assert late.step_s > as_stated[0].step_s  # rings over NVLink reach less than its rate
    assert isinstance(e.model, Decoder)
    assert " dp4 slice2 " in title(e.model, e.plan)
    case = Case(name="toy", model=e.model, plan=e.plan)
    assert Case.from_dict(case.to_dict()).plan == case.plan


def test_an_axis_is_searched_with_bounds_that_are_bounds(installed):
    job: dict[str, Any] = {"engine": "toy", **ASKED}
    everything = memplan.search("gpt2", keep=None, **job)
    fitting = everything[everything["verdict"] == "fits"]
    assert set(fitting["slice"]) == {1, 2, 4, 8}
    best = memplan.search("gpt2", keep=3, **job)
    assert list(best["step_s"][:3]) == pytest.approx(list(everything["step_s"][:3]), rel=1e-9)
    for row in fitting.to_dict("records")[::5]:
        varied = {name: row[name] for name in ("dp", "slice", "tp", "micro_batch")}
        check_laws(memplan.estimate("gpt2", **job, **varied))
    assert set(memplan.search("gpt2", **SLICED | {"slice": 4})["slice"]) == {4}


def test_an_axis_is_on_the_command_line(installed):
    job = ["--cluster", "8xh100-sxm", "--engine", "toy", "--global-batch", "16", "--seq-len", "512"]
    run = CliRunner().invoke(commands, ["estimate", "gpt2", *job, "--slice", "2"])
    assert run.exit_code == 0, run.output
    assert "slice=2" in run.output
    assert "--slice 2" in run.output
    found = CliRunner().invoke(commands, ["search", "gpt2", *job, "--slice", "2,4", "--all"])
    assert found.exit_code == 0, found.output
    assert re.search(r"# +pp +dp +sl +tp ", found.output)
    told = CliRunner().invoke(commands, ["estimate", "gpt2", "--engine", "toy", "-h"])
    assert "Ranks that hold slices of each weight" in told.output
    both = CliRunner().invoke(
        commands, ["compare", "gpt2", "engine=toy,slice=2", "engine=toy,slice=8", *job[:2]]
    )
    assert both.exit_code == 0, both.output


def test_what_an_engine_does_not_say_of_an_axis_is_an_error_and_no_wrong_number(installed, monkeypatch):
    with pytest.raises(PlanRefused, match=r"slice=2: engine='torch' divides nothing along slice; use"):
        memplan.estimate("gpt2", **SLICED | {"engine": "torch"})
    with pytest.raises(InvalidValue, match="slice=0 is not allowed"):
        memplan.estimate("gpt2", **SLICED | {"slice": 0})
    e = memplan.estimate("gpt2", **SLICED)

    def renamed(axis: str) -> Any:
        collective = Collective(kind="all_reduce", axis=axis, what="more", payload_bytes=8)
        step = chain("step", e.worst.record.step, events("more", [collective]))
        stages = (replace(e.worst, record=replace(e.worst.record, step=step)),)
        return replace(e, stages=stages)

    with pytest.raises(UnknownName, match="unknown axis 'slyce'; did you mean 'slice'"):
        _ = renamed("slyce").step_s
    with pytest.raises(InvalidValue, match="dp x tp' is of axes that are not beside each other"):
        _ = renamed("dp x tp").step_s


def test_a_record_that_frees_a_buffer_twice_is_refused(installed, monkeypatch):
    played = ToyEngine.play_rank

    def twice(*asked: Any) -> RankRecord:
        record = played(TOY, *asked)
        (freed,) = [e for e in record.step.parts[-1].events if isinstance(e, Free)]
        return replace(record, step=chain("step", record.step, events("again", [freed])))

    monkeypatch.setattr(ToyEngine, "play_rank", lambda _, *asked: twice(*asked))
    with pytest.raises(ContradictoryEstimate, match=r"'toy', .*'spare outputs' is freed once more than"):
        memplan.estimate("gpt2", engine="toy", **ASKED)


def test_a_record_that_leaves_a_buffer_behind_is_refused(installed, monkeypatch):
    played = ToyEngine.play_rank

    def leaks(*asked: Any) -> RankRecord:
        record, lost = played(TOY, *asked), buffer_of("a lost tensor", (3,), BF16, "activations")
        return replace(record, step=chain("step", record.step, events("leak", [Alloc(lost)])))

    monkeypatch.setattr(ToyEngine, "play_rank", lambda _, *asked: leaks(*asked))
    with pytest.raises(ContradictoryEstimate, match="'a lost tensor' of kind 'activations' is left by every"):
        memplan.estimate("gpt2", engine="toy", **ASKED)


def test_a_program_that_frees_what_it_has_not_allocated_is_refused():
    weights = buffer_of("a weight", (1024,), FP32, "weights")
    program = AllocatorProgram(setup=(), step=events("step", [Alloc(weights), Free(weights), Free(weights)]))
    with pytest.raises(ContradictoryEstimate, match="'a weight' is freed once more than it was allocated"):
        replayed(program)


def test_an_engine_that_does_not_play_the_allocator_says_what_is_known(installed, monkeypatch):
    """The tensors alone are a lower bound: too many do not fit, and no number of them is known to fit."""
    played = ToyEngine.play_rank
    monkeypatch.setattr(ToyEngine, "play_rank", lambda _, *asked: replace(played(TOY, *asked), program=None))
    small = memplan.estimate("gpt2", engine="toy", **ASKED)
    assert small.verdict == "cannot say"
    assert "CANNOT SAY: at least 0.5 of 79.1 GiB" in str(small)
    said = " ".join(verdict_text(small).split())
    assert "at least 483.70 MiB of tensors (what engine toy's allocator reserves is not known)" in said
    large = memplan.estimate("llama-3-70b", engine="toy", **ASKED)
    assert large.verdict == "does not fit"
    assert "DOES NOT FIT: at least 2" in str(large)
    assert "Nothing tried fits either" in str(memplan.advise(large))
    found = memplan.search("gpt2", engine="toy", **ASKED)
    assert set(found["verdict"]) == {"cannot say", "refused"}


def test_an_engines_plans_are_searched(installed):
    found = memplan.search("gpt2", engine="toy", **ASKED)
    best = found.iloc[0]
    assert best["verdict"] == "fits"
    assert best["pp"] == 1
    e = memplan.estimate(
        "gpt2", engine="toy", tp=int(best["tp"]), micro_batch=int(best["micro_batch"]), **ASKED
    )
    assert best["peak_bytes"] == e.peak.total_bytes
    assert (found["verdict"] == "refused").any()


def test_an_engine_is_on_the_command_line(installed):
    run = CliRunner().invoke(commands, ["estimate", "gpt2", "--engine", "toy", "--tp", "2"])
    assert run.exit_code == 0, run.output
    assert "engine=toy" in run.output
    unknown = CliRunner().invoke(commands, ["estimate", "gpt2", "--engine", "tourch"])
    assert unknown.exit_code == 2
    assert "did you mean 'torch'" in unknown.output


def test_a_precisions_row_is_gathered_and_reduced_as_it_says(installed):
    asked: dict[str, Any] = {"zero": 3, **ASKED}
    e = memplan.estimate("gpt2", precision="toy-reduce-fp32", **asked)
    narrow = memplan.estimate("gpt2", precision="bf16", **asked)
    assert e.peak.weights_bytes == narrow.peak.weights_bytes
    assert e.peak.optimizer_bytes == narrow.peak.optimizer_bytes
    sent = [{c.kind: c.payload_bytes for c in one.collectives} for one in (e, narrow)]
    assert sent[0]["all_gather"] == sent[1]["all_gather"]
    assert sent[0]["reduce_scatter"] == 2 * sent[1]["reduce_scatter"]
    assert "toy-reduce-fp32" in str(e)


def test_a_precision_is_searched_and_on_the_command_line(installed):
    found = memplan.search("gpt2", precision="toy-reduce-fp32", zero=(0, 3), tp=1, pp=1, keep=None, **ASKED)
    assert set(found["zero"][found["verdict"] == "fits"]) == {3}
    assert set(found["zero"][found["verdict"] == "refused"]) >= {0}
    run = CliRunner().invoke(
        commands, ["estimate", "gpt2", "--dp", "2", "--zero", "3", "--precision", "toy-reduce-fp32"]
    )
    assert run.exit_code == 0, run.output
    assert "toy-reduce-fp32" in run.output


@pytest.mark.parametrize(
    "asked,reason",
    [
        (
            {"precision": "toy-reduce-fp32", "zero": 0},
            r"buckets have the weights. type, bfloat16",
        ),
        ({"precision": "fp32-master", "zero": 3}, r"gradient in PyTorch has its weight's type"),
    ],
)
def test_a_precision_that_pytorch_cannot_run_is_refused(installed, asked, reason):
    with pytest.raises(PlanRefused, match=reason):
        memplan.estimate("gpt2", **asked, **ASKED)


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--dp", "2"], ["--dp", "2", "--pp", "2", "--global-batch", "8"]])
def test_a_precision_runs_as_it_is_predicted(installed, options):
    """PyTorch itself, on CPU ranks, which know the precision by the same entry points."""
    tests, packages = Path(__file__).parent, [p for p in sys.path if p.endswith("site")]
    path = os.pathsep.join([str(tests.parent), str(tests), *packages])
    asked = ["--model", "llama-small", "--zero", "2", "--precision", "toy-reduce-fp32", *options, "--json"]
    run = subprocess.run(
        [sys.executable, "-m", "validate", "run", *asked],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["outcome"] == "ok"
    assert found["states_off_bytes"] == found["collectives_off"] == 0
    assert abs(found["peak_error"]) < 1e-5


DEEP = "llama-3-8b"
PIPELINE: dict[str, Any] = {"pp": 2, "virtual_stages": 2, "schedule": "flood", **ASKED}


def test_a_schedules_plan_is_estimated_from_its_order(installed):
    e = memplan.estimate(DEEP, **PIPELINE)
    bfs = memplan.estimate(DEEP, **PIPELINE | {"schedule": "looped-bfs"})
    assert e.peak.weights_bytes == bfs.peak.weights_bytes
    assert e.peak.grads_bytes > bfs.peak.grads_bytes, "of both stages: it goes back through them in turn"
    assert [(c.kind, c.calls) for c in e.collectives] == [(c.kind, c.calls) for c in bfs.collectives]
    assert e.time.bubble_s > 0 < bfs.time.bubble_s
    assert "schedule=flood" in str(e)


def test_a_schedules_rules_are_asked(installed):
    with pytest.raises(PlanRefused, match=r"takes at least 2 micro-batches, not 1; use global_batch=2\."):
        memplan.estimate(DEEP, pp=2, schedule="flood", global_batch=1)


def test_a_schedule_is_searched_when_it_is_named(installed):
    job: dict[str, Any] = {"pp": 4, "tp": 2, "micro_batch": 1, "keep": None, "zero": 0, "recompute": "full"}
    job |= ASKED
    found = memplan.search(DEEP, schedule=("1f1b", "flood"), **job)
    assert set(found["schedule"]) == {"1f1b", "flood"}
    assert (found["schedule"] == "flood")[found["verdict"] == "fits"].any()
    assert "flood" not in set(memplan.search(DEEP, **job)["schedule"])


def test_a_schedule_is_on_the_command_line(installed):
    job = ["--cluster", "8xh100-sxm", "--global-batch", "8", "--pp", "4", "--schedule", "flood"]
    for command in ("estimate", "search"):
        run = CliRunner().invoke(commands, [command, DEEP, *job])
        assert run.exit_code == 0, run.output
        assert "flood" in run.output


def test_what_is_no_schedule_is_refused(installed):
    with pytest.raises(InvalidValue, match=r"schedule 'broken' is .* must be a memplan\.schedules\.Schedule"):
        memplan.estimate(DEEP, **PIPELINE | {"schedule": "broken"})


TOYS: dict[str, Any] = {"engine": "toy", **ASKED}


def test_an_engines_option_is_a_keyword_beside_a_plans(installed):
    plain, spare = (memplan.estimate("gpt2", **TOYS | {"spare_blocks": n}) for n in (0, 3))
    assert spare.plan.options == ToyOptions(spare_blocks=3)
    added = spare.peak.activations_bytes - plain.peak.activations_bytes
    assert added == 3 * 2 * 512 * plain.model.d_model
    assert "engine=toy, spare_blocks=3" in " ".join(str(spare).split())
    assert spare.to_dict()["plan"]["spare_blocks"] == 3
    assert isinstance(spare.model, Decoder)
    assert title(spare.model, spare.plan).endswith("spare3")
    case = Case(name="toy", model=spare.model, plan=spare.plan)
    assert Case.from_dict(case.to_dict()).plan == case.plan


def test_an_engines_option_is_checked(installed):
    with pytest.raises(InvalidValue, match=r"spare_blocks=-1 is not allowed; use an integer from 0"):
        memplan.estimate("gpt2", **TOYS | {"spare_blocks": -1})
    with pytest.raises(UnknownName, match=r"unknown style 'lout'; did you mean 'loud'"):
        memplan.estimate("gpt2", **TOYS | {"style": "lout"})
    with pytest.raises(UnknownName, match=r"option of a plan 'spare_block'; did you mean 'spare_blocks'"):
        memplan.estimate("gpt2", **TOYS | {"spare_block": 1})
    with pytest.raises(InvalidValue, match=r"spare_blocks=1 is an option of engine='toy', not of .*'torch'"):
        memplan.estimate("gpt2", **ASKED | {"spare_blocks": 1})
    with pytest.raises(InvalidValue, match=r"static_graph=True is an option of engine='torch', not of "):
        memplan.estimate("gpt2", engine="toy", static_graph=True)
    with pytest.raises(InvalidValue, match=r"options=ToyOptions.* are not the options of engine='torch'"):
        estimate_plan(preset("gpt2"), Plan(options=ToyOptions()))


def test_an_engines_option_is_searched_with(installed):
    job: dict[str, Any] = {"engine": "toy", "spare_blocks": [3, 0], **ASKED}
    found = memplan.search("gpt2", **job)
    fitting = found[found["verdict"] == "fits"]
    assert set(fitting["spare_blocks"]) == {0, 3}
    spare = fitting["command"].str.endswith("--spare-blocks 3")
    assert (spare == (fitting["spare_blocks"] == 3)).all()


def test_an_engines_option_is_on_the_command_line(installed):
    asked = ["--cluster", "8xh100-sxm", "--global-batch", "16", "--seq-len", "512", "--engine", "toy"]
    for command in ("estimate", "search"):
        run = CliRunner().invoke(commands, [command, "gpt2", *asked, "--spare-blocks", "3", "--json"])
        assert run.exit_code == 0, run.output
        assert '"spare_blocks": 3' in run.output
    told = CliRunner().invoke(commands, ["estimate", "gpt2", "--engine", "toy", "-h"])
    assert "--style plain|loud" in told.output.partition("Engine toy:")[2]
    for flag, owner, other in (("--spare-blocks", "toy", "torch"), ("--no-set-to-none", "torch", "toy")):
        refused = CliRunner().invoke(commands, ["estimate", "gpt2", "--engine", other, flag])
        assert refused.exit_code == 2
        assert f"{flag} is an option of engine {owner}, not of {other}" in refused.output
    plans = "engine=toy,spare_blocks=1", "engine=toy,spare_blocks=3"
    run = CliRunner().invoke(commands, ["compare", "gpt2", *plans, *asked[:-2]])
    assert run.exit_code == 0, run.output
    assert "spare_blocks" in run.output


def test_closed_forms_are_not_searched():
    with pytest.raises(InvalidValue, match="engine='textbook' is closed-form accounting"):
        memplan.search("gpt2", engine="textbook", **ASKED)


ENDS, NARROW_BLOCK, WIDE_BLOCK = 2 * 320 * 64 + 64, 64 + 2 * 64 * 64, 2 * 64 * 256
"""Elements of a mixed-tiny's ends and of a block of each kind: two are narrow, one wide, and so on."""


def test_a_familys_model_is_named_and_counted(installed):
    model = resolve("mixed-tiny")
    assert isinstance(model, Mixed)
    assert (model.kinds, model.n_blocks) == (("narrow", "wide"), 7)
    assert model.layers_in(range(1, 6)) == (("narrow", 1), ("wide", 1), ("narrow", 2), ("wide", 1))
    assert parameter_count(model) == ENDS + 5 * NARROW_BLOCK + 2 * WIDE_BLOCK
    with pytest.raises(UnknownName, match=r"'mixed-tinny'; did you mean 'mixed-tiny'\?"):
        resolve("mixed-tinny")


def test_a_familys_config_is_read(installed, tmp_path):
    file = tmp_path / "mine" / "config.json"
    file.parent.mkdir()
    file.write_text('{"model_type": "mixed", "depth": 5, "widening": 2}')
    expected = Mixed(name="mine", d_model=64, max_seq_len=128, n_layers=5, every=3, widening=2)
    assert resolve(file) == expected


def test_a_stage_holds_its_own_blocks(installed):
    e = memplan.estimate("mixed-tiny", pp=3, layers_per_stage=(1, 4, 2), precision="fp32", seq_len=128)
    held = [stage.states.weights_bytes // 4 for stage in e.stages]
    assert held == [
        320 * 64 + NARROW_BLOCK,
        3 * NARROW_BLOCK + WIDE_BLOCK,
        321 * 64 + WIDE_BLOCK + NARROW_BLOCK,
    ]


def test_units_of_several_kinds_are_gathered_block_by_block(installed):
    plan: dict[str, Any] = {"dp": 4, "zero": 3, "precision": "bf16", "seq_len": 128}
    for size, calls in ((1, 7), (2, 4), (3, 3)):
        found = memplan.estimate("mixed-tiny", **plan, fsdp_blocks=size).collectives
        gathered = next(c for c in found if c.kind == "all_gather")
        n_blocks = 5 * NARROW_BLOCK + 2 * WIDE_BLOCK
        assert (gathered.calls, gathered.payload_bytes) == (2 * calls + 1, 2 * (2 * n_blocks + ENDS))


def test_a_familys_plans_are_searched_and_printed(installed):
    asked = ASKED | {"seq_len": 128, "pp": (1, 2), "micro_batch": 2, "zero": 3, "offload": False}
    best = memplan.search("mixed-tiny", **asked, keep=3)
    every = memplan.search("mixed-tiny", **asked, keep=None)
    assert best.iloc[0]["verdict"] == "fits"
    assert list(best["step_s"][:3]) == list(every["step_s"][:3])
    assert len(every) > 10
    run = CliRunner().invoke(commands, ["estimate", "mixed-tiny", "--zero", "3", "--dp", "2", "--ledger"])
    assert run.exit_code == 0, run.output
    assert "7 layers" in run.output
    assert "; code: a toy" in " ".join(run.output.split())
    assert "narrow.*.up" in run.output
    assert "mixed-tiny" in CliRunner().invoke(commands, ["models"]).output


def test_what_tensor_ranks_cannot_divide_is_refused_in_the_operations_words(installed):
    with pytest.raises(PlanRefused, match=r"tp=3 does not divide n_rows of table=320; use .* 1, 2, 4, 5, 8"):
        memplan.estimate("mixed-tiny", tp=3)


@pytest.mark.parametrize(
    "sequence_parallel, refusal",
    [
        (False, r"an addition to head_norm\.weight\.grad of grad, which is Partial\(\) over tp, has no rule"),
        (True, r"linear output by columns of head_norm, which is Shard\(dim=1\) over tp, has no rule"),
    ],
)
def test_a_model_that_forgets_a_redistribution_is_refused(sequence_parallel, refusal, monkeypatch):
    def head(self: Mixed, x: Tensor) -> Tensor:
        return linear(rms_norm(x, "head_norm"), "output", 320, bias=False, split="columns")

    monkeypatch.setattr(Mixed, "head", head)
    model = Mixed(name="forgetful", d_model=64, max_seq_len=128, n_layers=3, every=3, widening=4)
    plan: dict[str, Any] = {"seq_len": 128, "sequence_parallel": sequence_parallel}
    with pytest.raises(MissingRule, match=refusal):
        memplan.estimate(model, tp=2, **plan)
    assert memplan.estimate(model, tp=1, seq_len=128).peak.total_bytes


def test_closed_forms_are_not_about_several_kinds(installed):
    with pytest.raises(MissingRule, match=r"mixed-tiny is of the family mixed; use engine='torch'\."):
        memplan.estimate("mixed-tiny", engine="textbook")


def test_another_implementation_is_refused_by_name(installed):
    with pytest.raises(UnknownName, match=r"unknown implementation of mixed: 'torchtitan'"):
        memplan.estimate("mixed-tiny", implementation="torchtitan")
