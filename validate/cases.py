"""Cases: configurations to be run and compared."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast

from memplan import Gpt, Llama, Plan, TracedModel
from memplan.device import CPU, CPU_OF_SHAPES, Device, DeviceType
from memplan.engines.options import not_usual, plan_dict, plan_of, said_by
from memplan.errors import InvalidValue, MemplanError, PlanRefused, unknown_name
from memplan.files import of_file, xz_text
from memplan.hardware import gpu
from memplan.mesh import DIVIDING, with_several
from memplan.models import Decoder, Model, resolve
from memplan.models.families import FAMILIES as FAMILIES_OF_MODELS
from memplan.models.families import implemented
from memplan.models.presets import preset_trace
from memplan.models.torchtitan import TorchtitanLlama
from memplan.models.trace_from_json import LARGEST_TRACE_BYTES, model_from_trace, model_of_text
from memplan.tape import Backend
from validate.gpus import Gpus
from validate.nogpu import RecordStream
from validate.shipped import data_folder

LEARNING_RATES: Final = {"sgd": 0.5, "sgd-momentum": 0.1, "rmsprop": 1e-4}
"""Large enough that a few steps on the same tokens move the loss far, so that a wrong gradient shows.

RMSprop's first step is ten times its rate.
"""

ADAM_RATE: Final = 0.003
"""That of all other optimizers."""

WIDTH: Final = 64
"""The largest `d_model` trained at those rates."""

RunsOn = Literal["cpu", "cuda", "nogpu"]
"""Where ranks run: "cuda" is a GPU, "nogpu" one that is not there (`validate.nogpu`)."""

Tensors = Literal["real", "fake"]
"""Whether tensors have data; "fake" ones have shapes only (`validate.fake`)."""

REFERENCE: Final = "reference"
"""The name of a single-process run that another one is compared with."""

TRAINING: Final = ("seq_len", "precision", "optimizer", "clip_grad_norm", "torch_version")
"""The fields of a plan that a single-process reference run keeps, which PyTorch itself runs."""

LEAST_STEPS: Final = 6
"""Two to warm up, one whose collectives are counted, three whose memory is observed."""


GPU_STEPS: Final = 10
"""On GPUs: three to warm up, one observed; six are timed. One more, with its collectives counted, follows."""

UNTIMED_STEPS: Final = 4
"""Where many layers are run for their memory only: three to warm up, one observed."""


FAKE_STEPS: Final = 2
"""Without data: one to warm up, some more with DDP, one counted and observed; none is timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One plan for one model, to be run and compared.

    `steps` are optimizer steps in all; those after the first six (on a GPU four) are timed. The ranks are
    ended after `timeout_s` seconds. Equal seeds give equal weights and tokens.

    The ranks run on `device`, a GPU of the name `gpu` in memplan's table, and communicate by `backend`.
    `rank`: only this rank runs, with stand-ins for the others (`validate.standin`); None: all ranks run. A
    rank whose allocator would hold more than `limit_bytes` is out of memory; None: all there is. With
    `tensors` of no data only bytes are seen. On a GPU that is not there blocks under
    `record_stream` come back to the allocator early or late.
    """

    name: str
    model: Decoder | TracedModel
    plan: Plan
    steps: int = LEAST_STEPS + 1
    seed: int = 1234
    timeout_s: float = 120.0
    device: RunsOn = "cpu"
    gpu: str = ""
    backend: Backend = "gloo"
    rank: int | None = None
    limit_bytes: int | None = None
    tensors: Tensors = "real"
    record_stream: RecordStream = "early"

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickles it as plain values, a traced model as its name."""
        return Case.from_dict, (self.to_compact_dict(),)

    @property
    def torch_device(self) -> DeviceType:
        """The `torch.device` type: "cuda" also for a GPU that is not there."""
        return "cpu" if self.device == "cpu" else "cuda"

    @property
    def kernels(self) -> Device:
        """The device whose kernels run.

        Raises:
            UnknownName: for a GPU that is not in memplan's table.
        """
        if self.tensors == "fake":
            return CPU_OF_SHAPES
        return CPU if self.device == "cpu" else gpu(self.gpu).device

    @property
    def talks_by(self) -> Backend:
        """memplan's name of the backend: NCCL's collectives take no time on a GPU that is not there."""
        return "nccl-at-once" if (self.device, self.backend) == ("nogpu", "nccl") else self.backend

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that run."""
        return range(self.plan.world_size) if self.rank is None else (self.rank,)

    @property
    def learning_rate(self) -> float:
        """The learning rate, smaller for wide models, which would memorise the tokens at once.

        Source: Yang et al. 2022, arXiv:2203.03466 (1 / width).
        """
        return LEARNING_RATES.get(self.plan.optimizer, ADAM_RATE) * WIDTH / max(WIDTH, self.model.d_model)

    @property
    def computes(self) -> bool:
        """Whether its values mean anything: kernels run on real data, and all ranks are real."""
        return self.is_timed and self.rank is None

    @property
    def is_timed(self) -> bool:
        """Whether its kernels really run, so that step times mean something."""
        return self.device != "nogpu" and self.tensors == "real"

    @property
    def is_of_others(self) -> bool:
        """Whether its module is not memplan's own: a traced one, or one of transformers."""
        return isinstance(self.model, TracedModel) or family_of(self.model) in OF_TRANSFORMERS

    @property
    def unchecked(self) -> str:
        """Why its training is not compared with a single-process run; empty if it is."""
        if self.device == "nogpu":
            return "not checked at all: without a GPU nothing is computed, so losses mean nothing"
        if self.tensors == "fake":
            return "not checked at all: its tensors have shapes and no data, so there is no loss"
        if self.rank is not None:
            return "not checked at all: the fake process group moves no data, so losses mean nothing"
        if isinstance(self.model, TracedModel) or self.is_of_others:
            return "only that the loss falls: other people's modules may normalise over the batch"
        if self.model.dropout:
            return "only that the loss falls: one process would drop other elements"
        if self.plan.engine == "deepspeed" and not self.plan.zero:
            return "only that the loss falls: DeepSpeed's set-up has updated on zeros, which Adam counts"
        if option(self.plan, "optimizer_in_backward", False):
            return "only that the loss falls: when the backward pass ends, its gradients are gone"
        if self.device == "cuda" and self.plan.world_size == 1:
            return "only that the loss falls: in a single batch it might not fit"
        return ""

    def reference(self) -> "Case":
        """The same training in a single process and a single batch: same model, tokens, precision, steps."""
        said = plan_dict(self.plan)
        batch = said["global_batch"]
        kept = {name: said[name] for name in TRAINING if name in said}
        alone = plan_of(micro_batch=batch, global_batch=batch, **kept)
        return replace(self, name=REFERENCE, plan=alone, limit_bytes=None)

    @property
    def identity(self) -> "Case":
        """The values by which cases are the same; the time-out is not among them."""
        return replace(self, timeout_s=0.0)

    def to_dict(self) -> dict[str, Any]:
        """The case as plain values; beside the plan's, how many micro-batches each replica accumulates."""
        model = _model_dict(self.model, asdict)
        plan = plan_dict(self.plan) | {"n_micro_batches": self.plan.n_micro_batches}
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**known, "model": model, "plan": plan, "learning_rate": self.learning_rate}

    def to_compact_dict(self) -> dict[str, Any]:
        """The case as plain values, without those that are defaults."""
        model = _model_dict(self.model, _not_default)
        return {**_not_default(self), "model": model, "plan": not_usual(self.plan)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "Case":
        """The case of `to_dict` or `to_compact_dict`.

        Raises:
            MemplanError, KeyError, TypeError: for values that are none.
        """
        known = dict(values)
        model = dict(known.pop("model"))
        known.pop("learning_rate", None)
        family = model.pop("family")
        plan = dict(known.pop("plan"))
        plan.pop("n_micro_batches", None)
        if conf := known.pop("alloc_conf", ""):  # as records had it before it was a plan's option
            plan["alloc_conf"] = conf
        asked = plan_of(**plan)
        if family == TracedModel.family:
            return Case(model=shipped_trace(model["name"], asked.tp, asked.ep, asked.cp), plan=asked, **known)
        return Case(model=FAMILIES[family](**model), plan=asked, **known)


def placed(case: Case, gpus: Gpus | None) -> Case:
    """The case on a machine's GPUs, or on CPU if there are none.

    NCCL takes one rank on each GPU; where there are more ranks than GPUs they share them and talk by gloo.

    Raises:
        InvalidValue: for tensors without data on GPUs.
    """
    if case.tensors == "fake":
        if gpus is not None:
            raise InvalidValue(
                f"{case.name!r} runs on CPU, on tensors without data; use no --device, or a suite for GPUs."
            )
        return case
    if gpus is None:
        return replace(case, device="cpu", gpu="", backend="gloo")
    backend: Backend = "nccl" if case.plan.world_size <= gpus.n else "gloo"
    return replace(case, device=gpus.device, gpu=gpus.known_as, backend=backend, steps=GPU_STEPS)


def check_case(case: Case) -> None:
    """Raise if the backend cannot run the plan's communication.

    Source: pytorch.org/docs/stable/distributed.html ("Backends"); ProcessGroupGloo.cpp (`send`), which hands
    the tensor's address to a socket.

    Raises:
        PlanRefused: for a pipeline of GPU ranks over gloo.
        InvalidValue: for a rank that runs alone over a backend that needs the others, or the reverse.
    """
    stands_in = case.backend == "fake" or (case.rank is not None and case.talks_by == "nccl-at-once")
    if stands_in != (case.rank is not None):
        raise InvalidValue(
            f"rank={case.rank}: one rank alone runs over backend 'fake', or 'nccl' on nogpu, and 'fake' runs "
            f"no others; backend={case.backend!r} on {case.device!r} takes "
            f"{'a rank' if case.rank is None else 'rank=None'}."
        )
    if case.torch_device == "cuda" and case.backend == "gloo" and case.plan.pp > 1:
        raise PlanRefused(
            f"pp={case.plan.pp}: gloo sends no tensor of a GPU; use a GPU for each rank (NCCL), or CPU ranks."
        )


OWN: Final[Mapping[str, type[Decoder]]] = {"gpt": Gpt, "llama": Llama, "torchtitan": TorchtitanLlama}
"""The models whose modules are in `validate.systems.torch.modules`, by their family."""

OF_TRANSFORMERS: Final[Mapping[str, type[Decoder]]] = {
    f"huggingface-{name}": cls
    for name in FAMILIES_OF_MODELS.own
    for cls in FAMILIES_OF_MODELS.named(name).implementations.values()
    if cls.implementation == "huggingface" and issubclass(cls, Decoder)
}
"""The models whose modules are transformers' own, by their family."""

FAMILIES: Final[Mapping[str, type[Decoder]]] = {**OWN, **OF_TRANSFORMERS}
"""The models that can be run, by their family."""


def runnable(named: object) -> Decoder:
    """The model of a name, a path or a Model, if it can be run.

    Raises:
        UnknownName: a model that there is not; a family, or an implementation, that cannot be run.
    """
    model = named if isinstance(named, Model) else _resolved(cast(Any, named))
    for cls in FAMILIES.values():
        if isinstance(model, cls):
            return model
    what = f"{model.family} ({model.implementation})"
    known = [f"{cls.family} ({cls.implementation})" for cls in FAMILIES.values()]
    raise unknown_name("model to run:", what, known)


def _resolved(named: str | os.PathLike[str]) -> Model:
    """The model in memplan's own modules if its family has them, else in transformers'."""
    model = resolve(named)
    if model.family not in FAMILIES_OF_MODELS.names():
        return model
    has_own = "reference" in FAMILIES_OF_MODELS.named(model.family).implementations
    return implemented(model, "reference") if has_own else model


def family_of(model: Decoder | TracedModel) -> str:
    """The name of a model's family."""
    if isinstance(model, TracedModel):
        return model.family
    return next(name for name, family in FAMILIES.items() if type(model) is family)


TRACES: Final = data_folder() / "traces"
"""The traces of other people's modules that are no presets."""

ARCHITECTURES: Final = TRACES / "architectures"
"""The traces of transformers' language models in small, compressed (`validate.architectures`)."""


DIVIDED: Final = TRACES / "divided"
"""The traces of modules that are divided over tensor ranks, compressed (`validate.traces`)."""


class Divided(NamedTuple):
    """A module's name, and the ranks that it is divided over."""

    name: str
    tp: int = 1
    ep: int = 1
    cp: int = 1

    def __str__(self) -> str:
        """The name of its trace.

        >>> str(Divided("hf-mixtral", tp=2, ep=4))
        'hf-mixtral.tp2.ep4'
        """
        return ".".join([self.name, *[f"{axis}{n}" for axis, n in self.mesh.items()]])

    @property
    def mesh(self) -> dict[str, int]:
        """The axes with several ranks."""
        return with_several(tp=self.tp, cp=self.cp, ep=self.ep)


def divided_named(text: str) -> Divided:
    """What the name of a trace says.

    >>> divided_named("qwen2.5-7b.tp2")
    Divided(name='qwen2.5-7b', tp=2, ep=1, cp=1)
    """
    degrees = "".join(rf"(\.{axis}(?P<{axis}>\d+))?" for axis in DIVIDING)
    parts = re.fullmatch(rf"(?P<name>.*?){degrees}", text)
    assert parts is not None
    return Divided(parts["name"], **{axis: int(parts[axis] or 1) for axis in DIVIDING})


def divided_traces() -> dict[Divided, Path]:
    """The files of the traces in `DIVIDED`."""
    return {divided_named(path.name.removesuffix(".json.xz")): path for path in sorted(DIVIDED.glob("*.xz"))}


def architecture_traces() -> dict[str, Path]:
    """The files of the traces in `ARCHITECTURES`, by name."""
    return {path.name.removesuffix(".json.xz"): path for path in sorted(ARCHITECTURES.glob("*.json.xz"))}


def trace_file(name: str) -> str:
    """Where the trace of one of other people's modules is: with memplan if it is a preset, else in `data`."""
    return preset_trace(name) or str(TRACES / f"{name}.json")


@cache
def shipped_trace(name: str, tp: int = 1, ep: int = 1, cp: int = 1) -> TracedModel:
    """The trace of one of other people's modules over these ranks, which comes with the project.

    Raises:
        UnknownName: there is none of this name; a path is no name.
        InvalidValue: its file is no trace.
    """
    packed = architecture_traces()
    asked = Divided(name, tp, ep, cp)
    if asked.mesh:
        divided = divided_traces()
        if asked not in divided:
            raise unknown_name("trace", str(asked), map(str, divided))
        return packed_trace(divided[asked])
    if name in packed:
        return packed_trace(packed[name])
    plain = {path.stem for path in TRACES.glob("*.json")}
    if name not in plain and preset_trace(name) is None:
        raise unknown_name("trace", name, plain)
    return model_from_trace(trace_file(name))


def packed_trace(path: Path) -> TracedModel:
    """The trace in a compressed file."""
    try:
        return model_of_text(xz_text(path, most_bytes=LARGEST_TRACE_BYTES, what="trace"))
    except MemplanError as error:
        raise of_file(path, error) from None


def _model_dict(model: Decoder | TracedModel, values: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """A model as plain values; of a traced one its name."""
    sizes = {"name": model.name} if isinstance(model, TracedModel) else values(model)
    return {"family": family_of(model), **sizes}


def _not_default(value: Any) -> dict[str, Any]:
    known = {field.name: getattr(value, field.name) for field in fields(value)}
    return {field.name: known[field.name] for field in fields(value) if known[field.name] != field.default}


def option(plan: Plan, name: str, otherwise: Any) -> Any:
    """The value of an option of the plan's engine; `otherwise` if it has none of this name."""
    return plan_dict(plan).get(name, otherwise)


WORDS: Final = (
    *("mb", "recompute", "first", "layers", "units", "blocks", "offload", "impl", "clip", "set-to-none"),
    *("bucket-view", "static-graph", "bucket", "hook", "chunks", "torch"),
)
"""The order of words in the names of the cases on file; other engines' follow."""


def title(model: Decoder | TracedModel, plan: Plan) -> str:
    """The name of a case: the model, the mesh, then every option that is not at its default.

    >>> from memplan.models import preset
    >>> title(preset("gpt2"), Plan(dp=2, zero=3, precision="bf16", offload=True))
    'gpt2 tied dropout, dp2 zero3 bf16 offload'
    """
    words = [f"{axis}{plan.mesh.size(axis)}" for axis in plan.mesh.divided] or ["one rank"]
    words += [f"{view}{n}" for view, n in plan.mesh.views.items() if n > 1]
    words += [f"zero{plan.zero}"] if plan.zero else []
    words += ["sp"] if plan.sequence_parallel else []
    words += [plan.schedule] if plan.pp > 1 else []
    words += [] if plan.precision == "fp32" else [plan.precision]
    words += [] if plan.optimizer == "adamw" else [plan.optimizer]
    others = {
        said.field.word: said.value for said in said_by(plan) if said.field.word and not said.is_default
    }
    words += [_option_words(word, others.pop(word)) for word in WORDS if word in others]
    words += [_option_words(word, value) for word, value in others.items()]
    kind = []
    if isinstance(model, Decoder):
        kind = [word for word, yes in (("tied", model.tied_head), ("dropout", model.dropout)) if yes]
    return f"{' '.join([model.name, *kind])}, {' '.join(words)}"


def _option_words(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"no-{name}"
    if isinstance(value, tuple):
        return f"{name}{'+'.join(map(str, value))}"
    return f"{name}={value}" if isinstance(value, str) else f"{name}{value:g}"
