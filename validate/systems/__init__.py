"""The frameworks that can be run: each sets up one rank's part of a case's training.

A framework is a module of this package with a function `prepared`, found by the name of memplan's engine that
plays it. All that the harness asks of it is a `Training`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Final, Protocol, cast

import torch
from torch import Tensor

from memplan.errors import PlanRefused
from validate.cases import Case, option

RUN: Final = ("torch", "deepspeed", "fairscale", "colossalai")

SYSTEMS: Final = {name: f"validate.systems.{name}" for name in RUN}
"""The module that runs the framework of each of memplan's engines."""

TRAINERS: Final = dict.fromkeys(("huggingface", "sft", "dpo", "grpo"), "validate.systems.huggingface")
"""The module that runs each trainer, over whichever framework."""


class Training(ABC):
    """One rank's part of a training, set up.

    `axis_of_group` says of each process group, by its name, which mesh axis it is of.
    """

    def __init__(self, axis_of_group: Mapping[str, str]) -> None:
        self.axis_of_group = axis_of_group
        self.after_step: Callable[[], None] | None = None
        """Called when a step is done."""

    @abstractmethod
    def gradients(self) -> float | None:
        """Runs forward and backward of a step; the rank's mean loss, None where there is no last stage."""

    @abstractmethod
    def update(self) -> None:
        """Runs the optimizer; the gradients are gone, or zero, after."""

    @abstractmethod
    def weights(self) -> Sequence[Tensor]:
        """This rank's local weight tensors, trained or frozen."""

    @abstractmethod
    def grads(self) -> Sequence[Tensor]:
        """The gradients that this rank holds between backward and update."""

    @abstractmethod
    def optimizer_states(self) -> Sequence[Tensor]:
        """The tensors of this rank's optimizer state."""

    @abstractmethod
    def gradient_norm_squared(self) -> float:
        """The squared norm of the gradient of this rank's stages, each tensor counted once."""

    def finish(self) -> None:
        """The end of a step, once there are gradients."""
        self.update()
        if self.after_step is not None:
            self.after_step()

    def step(self) -> float | None:
        """One whole step; its loss as `gradients` gives it."""
        loss = self.gradients()
        self.finish()
        return loss


class System(Protocol):
    """The interface of a framework's module."""

    def prepared(self, case: Case, rank: int, device: torch.device) -> Training:
        """The case's training on one rank; if there are several, the process group of all exists."""


def prepared(case: Case, rank: int, device: torch.device) -> Training:
    """The case's training on one rank, by its plan's trainer, or the framework that its engine plays.

    Raises:
        PlanRefused: if that cannot be run.
    """
    engine = case.plan.engine
    if engine not in SYSTEMS:
        raise PlanRefused(f"engine={engine!r} cannot be run; use {' or '.join(map(repr, SYSTEMS))}.")
    system = TRAINERS.get(option(case.plan, "trainer", "none"), SYSTEMS[engine])
    return cast(System, import_module(system)).prepared(case, rank, device)
