"""transformers' Trainer itself, set up from a plan: what a training script hands it, and its own loop.

Needs `pip install accelerate greenlet` beside transformers. The Trainer runs in a greenlet, which stops where
the harness looks: before the optimizer's step, and when a step has ended.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from tempfile import mkdtemp
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from memplan import Plan
from memplan.engines.torch.options import OF_TRL
from memplan.errors import MemplanError, PlanRefused
from memplan.launchers.transformers import training_arguments
from memplan.models import Decoder
from memplan.shapes import FP32
from validate.cases import Case, option
from validate.systems import Training
from validate.systems.huggingface.trl import dpo_trainer, grpo_trainer, n_targets, sft_trainer
from validate.systems.torch.adapters import scales_of, with_adapters
from validate.systems.torch.masks import masks_as_on_a_gpu
from validate.systems.torch.parallelize import torch_dtype
from validate.systems.torch.wild import values_as_on_a_gpu, wild_of

STEPS: Final = 1000
"""More steps than are ever asked for."""


class Samples(Dataset[dict[str, list[int]]]):
    """A dataset of n equal samples: the ids, mask and labels of one sequence without padding."""

    def __init__(self, ids: list[int], n: int) -> None:
        self._sample = {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}
        self._n = n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, _: int) -> dict[str, list[int]]:
        return self._sample


class TrainerTraining(Training):
    """The Trainer's loop, one step at a time."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        """`make`: the Trainer, with a callback."""
        super().__init__({})
        greenlet: Any = import_module("greenlet")
        self._harness = greenlet.getcurrent()
        self._trainer = make(self._callback())
        self._loop = greenlet.greenlet(values_as_on_a_gpu()(self._trainer.train))
        self._loss = 0.0
        self._loop.switch()  # to the first step
        n = dist.get_world_size() if dist.is_initialized() else 1
        names = dist.distributed_c10d._world.pg_names if n > 1 else {}
        self.axis_of_group = {str(name): "dp" for group, name in names.items() if group.size() == n}

    def _callback(self) -> Any:
        """What the Trainer calls: each call hands over to the harness."""
        transformers: Any = import_module("transformers")

        def hands_over(*_: Any, **__: Any) -> None:
            self._harness.switch()

        names = ("on_train_begin", "on_pre_optimizer_step", "on_step_end")
        kind = type("HandsOver", (transformers.TrainerCallback,), dict.fromkeys(names, hands_over))
        return kind()

    def gradients(self) -> float | None:
        self._loop.switch()
        total = float(self._trainer._tr_loss)
        step, self._loss = total - self._loss, total
        return step

    def update(self) -> None:
        self._loop.switch()
        if not self.optimizer_states():
            raise RuntimeError("the Trainer's optimizer has no state: it has taken no step")

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return list(self._trainer.model_wrapped.parameters())

    def weights(self) -> Sequence[Tensor]:
        reference = getattr(self._trainer, "ref_model", None)
        frozen = [] if reference is None else list(reference.parameters())
        return [*map(_local, [*self._parameters, *frozen]), *scales_of(self._trainer.model)]

    def grads(self) -> Sequence[Tensor]:
        return [_local(one.grad) for one in self._parameters if one.grad is not None]

    def optimizer_states(self) -> Sequence[Tensor]:
        states = self._trainer.optimizer.optimizer.state.values()
        return [_local(one) for state in states for one in state.values() if isinstance(one, Tensor)]

    def gradient_norm_squared(self) -> float:
        raise PlanRefused("the Trainer clips gradients before anyone sees them.")


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def prepared(case: Case, rank: int, device: torch.device) -> Training:
    """The case's Trainer on this rank, at its first step.

    Raises:
        MemplanError: where accelerate or greenlet is not installed.
    """
    for package in ("accelerate", "greenlet"):
        if find_spec(package) is None:
            raise MemplanError(f"the Trainer needs {package}; pip install 'memplan[trainers]'.")
    plan = case.plan
    os.environ.update(_ranks(plan, rank))
    transformers: Any = import_module("transformers")

    def make(callback: Any) -> Any:
        asked = training_arguments(plan) | _of_harness(case)
        generator = torch.Generator().manual_seed(case.seed)
        ids = torch.randint(3, cast(Decoder, case.model).vocab_size, (plan.seq_len,), generator=generator)
        samples, callbacks = Samples(ids.tolist(), STEPS * plan.global_batch), [callback]
        trainer, module = option(plan, "trainer", "none"), _module(case, device)
        if trainer in OF_TRL and not case.computes:
            n = option(plan, "max_completion_length", None)
            masks_as_on_a_gpu(partial(n_targets, None if n is None else (plan.seq_len - 1, n)))
        if trainer == "sft":
            return sft_trainer(module, asked, samples, callbacks)
        if trainer == "dpo":
            return dpo_trainer(module, asked, samples, callbacks, plan)
        if trainer == "grpo":
            return grpo_trainer(module, asked, samples, callbacks, plan, computes=case.computes)
        return transformers.Trainer(
            model=module,
            args=transformers.TrainingArguments(**asked),
            train_dataset=samples,
            data_collator=transformers.default_data_collator,
            callbacks=callbacks,
        )

    return TrainerTraining(make)


def _of_harness(case: Case) -> dict[str, Any]:
    """Arguments that change no byte: where output goes, what is logged and saved, how often."""
    return {
        "output_dir": mkdtemp(),
        "learning_rate": case.learning_rate,
        "max_steps": STEPS,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": case.device == "cpu",
        "dataloader_pin_memory": case.device != "cpu",
    }


def _ranks(plan: Plan, rank: int) -> dict[str, str]:
    """What torchrun tells a rank, which here is alone on its machine."""
    if plan.world_size == 1:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def _module(case: Case, device: torch.device) -> nn.Module:
    """The model on the host, as `from_pretrained` returns it: where nothing is computed, without values."""
    torch.manual_seed(case.seed)
    wild, stored = wild_of(case.model), case.plan.formats.stored
    if case.computes:
        module = wild.module()
    else:
        with import_module("transformers.initialization").no_init_weights(), torch.device("meta"):
            module = wild.module()
        module.to_empty(device="cpu")
        cast(Any, module).tie_weights()
    if case.plan.adapters is not None:
        module = with_adapters(module, case.plan, case.plan.adapters, device)
    if stored != FP32:
        for one in filter(torch.is_floating_point, module.parameters()):
            one.data = one.data.to(torch_dtype(stored))
    return module
