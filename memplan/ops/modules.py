"""Operations that are modules of their own, with the hooks that a framework registers on modules.

Such a framework is DeepSpeed's ZeRO-3: it gathers a module's weights before its forward and its backward
pass, and releases them after each.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

from memplan.record import HookKind, ModuleHook
from memplan.shapes import Parameter
from memplan.tape import Grads, Saved, Tensor

F = TypeVar("F", bound=Callable[..., Tensor])


def as_module(operation: F) -> F:
    """The operation, which marks its hooks if the context has them; its second argument names the module.

    Source: `torch.nn.Module.register_forward_pre_hook` and the two beside it, `torch.autograd.Function`.
    """

    @wraps(operation)
    def called(x: Tensor, name: str, *args: Any, **kwargs: Any) -> Tensor:
        tape = x.tape
        if not tape.context.hooks_modules:
            return operation(x, name, *args, **kwargs)
        path = f"{tape.scope}{name}"
        tape.events.append(ModuleHook("pre_forward", path))
        y = operation(_hooked(x, "post_backward", path), name, *args, **kwargs)
        tape.events.append(ModuleHook("post_forward", path))
        return _hooked(y, "pre_backward", path)

    return cast(F, called)


def _hooked(x: Tensor, kind: HookKind, path: str) -> Tensor:
    """The same tensor, whose gradient calls a hook on its way; data have none."""
    if x.node is None or isinstance(x.node, Parameter):
        return x

    def backward(grad: Tensor, saved: Saved) -> Grads:
        grad.tape.events.append(ModuleHook(kind, path))
        return (grad,)

    return replace(x, node=x.tape.node((x.node,), (), backward))
