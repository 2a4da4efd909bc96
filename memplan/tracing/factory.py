"""A module and its example inputs, in the forms in which people write them, traced."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from inspect import Parameter, signature
from traceback import extract_tb
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from memplan.device import DeviceType
from memplan.errors import InvalidValue, reason, shown_value, unknown_name
from memplan.files import shown_path
from memplan.mesh import Group
from memplan.models import TracedModel
from memplan.models.recording import Compiles, Term
from memplan.models.torchtitan import TorchtitanLlama
from memplan.tracing.cache import told
from memplan.tracing.cuda import CUDA
from memplan.tracing.example import checked_example
from memplan.tracing.float8 import with_float8
from memplan.tracing.torchtitan import TorchtitanTransformer, parallelize, token_loss
from memplan.tracing.tracer import LENGTHS, trace, traced

FORMS = (
    "(module, inputs), (module, args, kwargs), or a dict of memplan.trace's arguments: "
    '{"module": ..., "example_inputs": ..., "targets": ..., "loss": ...}'
)
"""The forms, for an error's text."""


def made_by(name: str) -> Any:
    """What the function `package.module:factory` returns; the current folder is looked into first.

    Raises:
        InvalidValue: there is no such function, or it fails.
    """
    module_name, _, attribute = name.partition(":")
    with patch.object(sys, "path", [os.getcwd(), *sys.path]):
        try:
            found: Any = import_module(module_name)
            for part in attribute.split("."):
                found = getattr(found, part)
            return found()
        except Exception as error:
            where = extract_tb(error.__traceback__)[-1]
            at = f", {shown_path(where.filename)} line {where.lineno}"
            raise InvalidValue(
                f"{name} cannot be called ({type(error).__name__}: {reason(error)}{at}); name a function "
                "without arguments as package.module:factory."
            ) from error


def traced_example(
    made: Any,
    device: DeviceType,
    precisions: Sequence[str] = (),
    *,
    what: str = "model",
    mesh: Mapping[Group, int] | None = None,
) -> TracedModel:
    """A module with its example inputs, traced, divided over a `mesh` if there is one.

    `made`: `(module, inputs)`, `(module, args, kwargs)`, or a dict of `memplan.trace`'s arguments, which go
    before the others here. A module of transformers may stand alone: its class says what it is called with.

    Raises:
        InvalidValue: another value, or a module alone whose inputs nobody knows.
        MemplanError: as `memplan.trace`.
    """
    asked = {"device": device, "mesh": mesh or {}, **({"precisions": precisions} if precisions else {})}
    given = asked | arguments_of(made, what)
    with told(type(given["module"]).__name__, given["device"]):
        return trace(**given)


def arguments_of(made: Any, what: str) -> dict[str, Any]:
    """The arguments of `memplan.trace` that a form stands for.

    Raises:
        InvalidValue: another value, or a module alone whose inputs nobody knows.
    """
    match made:
        case nn.Module():
            return {"module": made, "example_inputs": _known_inputs(made, what)}
        case (nn.Module() as module, inputs):
            return {"module": module, "example_inputs": inputs}
        case (nn.Module() as module, args, Mapping() as kwargs):
            return {"module": module, "example_inputs": _named(module, args, kwargs, what)}
        case {"module": module}:
            known = signature(trace).parameters
            for key in made:
                if key not in known:
                    raise unknown_name(f"key of {what}", key, known)
            return {**made} if "example_inputs" in made else {**arguments_of(module, what), **made}
    raise InvalidValue(f"{what} is {shown_value(made)}; give {FORMS}.")


def _named(module: nn.Module, args: Any, kwargs: Mapping[str, Any], what: str) -> Any:
    """All arguments of a call by their names, if there are keywords."""
    args = tuple(args) if isinstance(args, tuple | list) else (args,)
    if not kwargs:
        return args
    bound = signature(module.forward).bind_partial(*args)
    if any(bound.signature.parameters[name].kind is Parameter.VAR_POSITIONAL for name in bound.arguments):
        raise InvalidValue(
            f"{what} gives *args, which have no names, and keywords; give all of them as keywords: "
            "(module, {...})."
        )
    return {**bound.arguments, **kwargs}


def _known_inputs(module: nn.Module, what: str) -> Any:
    """The inputs of a module of transformers."""
    from memplan.tracing.huggingface import inputs_of  # needs no transformers: its module has it

    found = inputs_of(module)
    if found is None:
        raise InvalidValue(
            f"{what} is a module ({type(module).__name__}) without example inputs; give {FORMS}."
        )
    return found


def traced_from_sizes(
    sizes: Mapping[str, Any],
    device: DeviceType,
    precisions: Sequence[str],
    compiles: Compiles | None,
    recipe: str = "none",
    mesh: Mapping[Group, int] | None = None,
    *,
    gathers_float8: bool = False,
    sequence_parallel: bool = False,
) -> TracedModel:
    """The model of these sizes as its module runs it, in float8 as `with_float8` says.

    Divided over a `mesh`, also between its regions if `sequence_parallel`, with the loss of parts of logits.
    Its rotary angles, of which the traced module has as many rows as its short example needs, have one for
    each token of a sequence.
    """
    model = TorchtitanLlama(**sizes)
    seq_len = max(LENGTHS) if compiles is None else compiles.seq_len
    tokens, targets = torch.zeros(2, 2, seq_len, dtype=torch.int64).unbind()
    module = TorchtitanTransformer(model, seq_len)
    example = checked_example(module, tokens, token_loss, targets)
    with_float8(module, recipe, all_gather=gathers_float8)
    runs_on = torch.device("cpu") if device == "cpu" else CUDA

    def divides(one: nn.Module, ranks: Any) -> None:
        module = cast(TorchtitanTransformer, one)
        parallelize(module, ranks["tp"], sequence_parallel=sequence_parallel, float8=recipe)

    with loss_parallel() if mesh else nullcontext():
        found = traced(
            example,
            runs_on,
            "blocks",
            precisions,
            None,
            model.name,
            mesh=mesh,
            parallelize=divides,
            compiles=compiles,
        )
    (rotation,) = found.module_buffers
    rows = (Term(1, seq_power=1),)
    return replace(found, module_buffers=(rotation._replace(shape=(rows, *rotation.shape[1:])),))
