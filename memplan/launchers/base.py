"""The interface of a launcher: which plans it can say, how it says them, what it does otherwise."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

from memplan.command import estimate_command, export_command, plan_values
from memplan.engines.options import not_usual
from memplan.errors import InvalidValue, MemplanError, PlanRefused, shown_value
from memplan.estimate import Estimate, estimate
from memplan.files import file_text, of_file
from memplan.models import Model
from memplan.registry import Registry
from memplan.text_tables import printable
from memplan.units import human_bytes
from memplan.version import version

OF_FSDP1: Final = ("use_orig_params", "backward_prefetch", "forward_prefetch")
"""Options that mean nothing beside FSDP2."""

CHANGES_MODULES: Final = {
    "compile": "what memplan exports runs blocks as they are",
    "float8": "linears are converted by the code that trains them",
    "liger_kernel": "Liger patches the model in the code that trains it",
    "chunked_loss": "the loss passes through the output layer in the code that trains it",
    "optimizer_in_backward": "hooks of the weights are registered in the code that trains",
    "activation_offloading": "blocks run in save_on_cpu in the code that trains them",
}
"""Options that change the modules, which no launcher is told, and why."""

LARGEST_FILE_BYTES: Final = 1024**2
"""A configuration is a few KiB; a larger file is taken for a mistake."""


MOST_ROUNDS: Final = 3
"""How often a plan is changed until a launcher can be told it: one way out may lead to another limit."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A plan as a launcher is told it.

    Attributes:
        text: the content of the file.
        file: the usual name of the file.
        notes: what the launcher does otherwise than the plan says; `text` has them as comments where its
            format has comments.
    """

    text: str
    file: str
    notes: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What a launcher's file says.

    Attributes:
        keywords: arguments of `memplan.estimate`, `model` among them if the file names one.
        notes: what the launcher does otherwise than is planned.
        n_micro_batches: micro-batches of each replica, if it says that; with it the number of ranks gives
            the `global_batch`, or the `micro_batch`.
        open: the keywords that the file leaves to its caller ("auto"): their values are the usual ones.
    """

    keywords: dict[str, Any]
    notes: tuple[str, ...] = ()
    n_micro_batches: int | None = None
    open: frozenset[str] = frozenset()

    def on_ranks(self, n_replicas: int, micro_batch: int = 1) -> dict[str, Any]:
        """The keywords with the batch that so many replicas have.

        `micro_batch`: the caller's, if the file leaves it open.

        Raises:
            InvalidValue: batches that contradict each other, in DeepSpeed's words.
        """
        n, found = self.n_micro_batches, dict(self.keywords)
        if n is None:
            return found
        if "micro_batch" not in found and "global_batch" in found:
            found["micro_batch"] = max(1, found["global_batch"] // (n_replicas * n))
        whole = found.get("micro_batch", micro_batch) * n * n_replicas
        if found.setdefault("global_batch", whole) != whole:
            raise InvalidValue(
                "train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size "
                f"{found['global_batch']} != {found['micro_batch']} * {n} * {n_replicas}; use "
                f"train_batch_size={whole}."
            )
        return found


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be run: an estimate, and how its model was named (a preset, or a path); None: by itself."""

    estimate: Estimate
    named: str | None = None

    @property
    def nodes(self) -> int:
        """Nodes of the cluster; 1 without a cluster."""
        cluster = self.estimate.cluster
        return 1 if cluster is None else -(-cluster.n_gpus // cluster.gpus_per_node)

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node."""
        return self.estimate.plan.world_size // self.nodes

    @property
    def headline(self) -> str:
        """The plan and its bytes, in one line."""
        estimate, plan = self.estimate, self.estimate.plan
        return _line(
            f"{estimate.model.name} on {plan.world_size} ranks: {plan.mesh}, zero={plan.zero}, "
            f"{plan.precision}. memplan {version()}: {human_bytes(estimate.worst.peak_bytes)} of tensors "
            "on the fullest."
        )

    @property
    def command(self) -> str | None:
        """The `memplan estimate` line of the plan; None for a model that no command line can name."""
        command = estimate_command(self.estimate, self.named)
        return None if command is None else _line(command)

    def comments(self, notes: tuple[str, ...]) -> Iterator[str]:
        """The head of a file: the plan, the command that estimates it, what the launcher does otherwise."""
        yield self.headline
        if self.command is not None:
            yield self.command
        yield from notes


@final
@dataclass(frozen=True, slots=True)
class Limit:
    """What of a plan a launcher cannot be told.

    Attributes:
        why: the value and the rule: "pp=2: Accelerate trains no pipelines".
        use: keywords of `memplan.estimate` with values that would do, None for one that is to be left out; a
            phrase where no keywords do.
    """

    why: str
    use: Mapping[str, Any] | str

    def __str__(self) -> str:
        if isinstance(self.use, str):
            return f"{self.why}; {self.use}"
        ways = [f"leave {n} out" if v is None else f"use {n}={v!r}" for n, v in self.use.items()]
        return f"{self.why}; {' and '.join(ways)}"


def _line(text: str) -> str:
    """Text that cannot end a comment or a docstring, whatever a model is called."""
    return printable(" ".join(text.split())).replace("\\", "/").replace('"', "'")


class Launcher(ABC):
    """A program that runs plans."""

    engine: ClassVar[str] = "torch"
    """The engine whose plans it runs."""
    file: ClassVar[str]
    """The usual name of the file that it is told a plan by."""
    tells: ClassVar[tuple[str, ...]] = ()
    """The options among `CHANGES_MODULES` that it is told all the same."""

    def limits(self, job: Job) -> Iterator[Limit]:
        """What of the plan it cannot be told, each with a way out."""
        yield from ()

    def notes(self, job: Job) -> Iterator[str]:
        """What it does otherwise than the plan says, each as a sentence."""
        yield from ()

    @abstractmethod
    def text(self, job: Job, notes: tuple[str, ...]) -> str:
        """The content of the file for a plan that it can be told."""

    def read(self, text: str, model: Model | None) -> Read:
        """The keywords of `memplan.estimate` that such a file says, for a model; None: the file names it.

        Raises:
            InvalidValue: a file that is none, or with a setting that memplan has no rule for, by name.
        """
        raise InvalidValue("it is written and not read back; use the flags of memplan estimate.")


LAUNCHERS: Final = Registry(
    what="launcher",
    kind=Launcher,  # type: ignore[type-abstract]
    own={
        "torchrun": "memplan.launchers.torchrun:TORCHRUN",
        "torchtitan": "memplan.launchers.torchtitan:TORCHTITAN",
        "accelerate": "memplan.launchers.accelerate:ACCELERATE",
        "transformers": "memplan.launchers.transformers:TRANSFORMERS",
        "deepspeed": "memplan.launchers.deepspeed:DEEPSPEED",
        "megatron": "memplan.launchers.megatron:MEGATRON",
    },
)
"""The launchers by name; one is imported when it is first named."""

OWN_LOOPS: Final = ("torchrun", "torchtitan")
"""The launchers of scripts that call the module themselves."""


def limits(job: Job, to: str) -> tuple[Limit, ...]:
    """Why a launcher cannot be told a plan; empty if it can."""
    launcher, engine = LAUNCHERS.named(to), job.estimate.plan.engine
    if engine != launcher.engine:
        why = f"engine={engine!r}: it runs plans of {launcher.engine!r}"
        return (Limit(why, {"engine": launcher.engine}),)
    if job.estimate.plan.adapters is not None:
        why = f"lora_rank={job.estimate.plan.lora_rank}: adapters are made by the code that trains them"
        return (Limit(why, "call peft.get_peft_model in yours"),)
    told = not_usual(job.estimate.plan)
    if told.get("fsdp_version") == 1:
        others = dict.fromkeys([name for name in told if name in OF_FSDP1])
        why = "fsdp_version=1: what memplan exports is FSDP2 (fully_shard)"
        return Limit(why, {"fsdp_version": None, **others}), *launcher.limits(job)
    if "trainer" in told and to in OWN_LOOPS:
        why = f"trainer={told['trainer']!r}: what is exported to {to} has a loop of its own"
        return (Limit(why, "use --to transformers"),)
    changed = [
        Limit(f"{option}={told[option]!r}: {why}", {option: None})
        for option, why in CHANGES_MODULES.items()
        if option in told and option not in launcher.tells
    ]
    return *changed, *launcher.limits(job)


def _nearest(job: Job, to: str, found: tuple[Limit, ...]) -> str | None:
    """The command that exports the plan with every limit's way out; None if that is none, or refused too."""
    near = job.estimate
    for _ in range(MOST_ROUNDS):
        values = plan_values(near.plan) | ({"device": "cpu"} if near.device.on_cpu else {})
        if near.cluster is not None:
            values.pop("dp", None)  # what the cluster has left
        for limit in found:
            if isinstance(limit.use, str):
                return None
            values |= limit.use
        asked = {name: value for name, value in values.items() if value is not None}
        try:
            near = estimate(near.model, cluster=near.cluster, **asked)
        except MemplanError:
            return None
        if not (found := limits(Job(estimate=near, named=job.named), to)):
            return export_command(near, to, job.named)
    return None


def exported(estimate: Estimate, to: str, named: str | None = None) -> Export:
    """A plan as the launcher `to` is told it.

    `named`: how the model was named on the command line, a preset or a path; None: the model itself.

    Raises:
        UnknownName: a launcher that there is not.
        PlanRefused: a plan that the launcher cannot be told, with every reason and a way out of each.
    """
    launcher, job = LAUNCHERS.named(to), Job(estimate=estimate, named=named)
    if found := limits(job, to):
        text = f"{to} cannot be told this plan. {'. '.join(map(str, found))}."
        command = _nearest(job, to, found)
        near = "" if command is None else f" The nearest that it can be told: {command}"
        raise PlanRefused(text + near, kind=f"not for {to}")
    notes = tuple(launcher.notes(job))
    return Export(text=launcher.text(job, notes), file=launcher.file, notes=notes)


def targets(estimate: Estimate) -> tuple[str, ...]:
    """The launchers that can be told a plan; what the Trainer trains is told to the Trainer first."""
    by_trainer = "trainer" in not_usual(estimate.plan)
    names = sorted(LAUNCHERS.names(), key=lambda to: by_trainer and to != "transformers")
    return tuple(to for to in names if not limits(Job(estimate=estimate), to))


def read(path: str | os.PathLike[str], of: str, model: Model | None = None) -> Read:
    """What a launcher's file says, for a model; None: the file names it.

    A path that begins with "--" is not a file's but the launcher's arguments themselves.

    Raises:
        UnknownName: a launcher that there is not.
        InvalidValue: a file that cannot be read, or with a setting that memplan has no rule for, by name.
    """
    launcher = LAUNCHERS.named(of)
    try:
        text = str(path)
        if not text.startswith("--"):
            text = file_text(path, most_bytes=LARGEST_FILE_BYTES, what=f"configuration of {of}")
        return launcher.read(text, model)
    except MemplanError as error:
        raise of_file(path, error) from None


def yaml_values(text: str, what: str) -> dict[str, Any]:
    """The values of a YAML or JSON file; `what` it should be, in words.

    Raises:
        InvalidValue: no PyYAML, no YAML, an alias, or no settings.
    """
    try:
        import yaml
    except ModuleNotFoundError:
        raise InvalidValue("needs PyYAML to be read; pip install 'memplan[launchers]'.") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """A loader without aliases, by which a short file could stand for a huge one."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise InvalidValue("has an alias (*name), which no such file needs; write the value.")
            return super().compose_node(parent, index)

    try:
        values: object = yaml.load(text, Loader)
    except InvalidValue:
        raise
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        shown = shown_value(str(error), 120)
        raise InvalidValue(f"is not YAML ({shown}); use {what}.") from None
    if not isinstance(values, dict):
        raise InvalidValue(f"holds no settings; use {what}.")
    return {str(key): value for key, value in values.items()}
