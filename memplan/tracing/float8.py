"""Modules whose linears multiply in float8: torchao's own `Float8Linear`, as torchtitan converts them."""

from dataclasses import replace
from importlib import import_module
from typing import Any, Final, cast

from torch import nn

from memplan.errors import installed
from memplan.kernels import SCALED_MM_MULTIPLE
from memplan.tracing.cache import without_remarks

HEAD: Final = "head.output"
"""The head of torchtitan's module here, whose name there is `output` (`filter_fqns`)."""


def styles_in_float8() -> tuple[Any, Any, Any]:
    """The styles of products by columns and by rows, and of their inputs, that gather what is cast already.

    They are of one scale for each tensor; other recipes have PyTorch's own styles.

    Source: torchtitan/models/llama3/infra/parallelize.py (`apply_tp`, `enable_float8_tensorwise_tp`).
    """
    with installed("float8", "float8"), without_remarks():
        torchao: Any = import_module("torchao.float8.float8_tensor_parallel")
    return torchao.Float8ColwiseParallel, torchao.Float8RowwiseParallel, torchao.PrepareFloat8ModuleInput


def with_float8(module: nn.Module, recipe: str, *, all_gather: bool = False) -> nn.Module:
    """The module with its linears but the head's converted by a recipe of torchao; as it is for "none".

    Linears with a dim that is no multiple of 16 stay as they are. `all_gather`: the weights of those that are
    converted have FSDP2's hooks around an all-gather in float8.

    Source: `torchao.float8:convert_to_float8_training`; torchtitan/components/quantization/float8.py
    (`Float8LinearConverter`, `module_filter_utils`).

    Raises:
        MissingPackage: torchao is not installed.
    """
    if recipe == "none":
        return module
    head = getattr(module, "get_output_embeddings", lambda: None)()

    def converts(one: nn.Module, name: str) -> bool:
        weight = cast(nn.Linear, one).weight
        whole = all(n % SCALED_MM_MULTIPLE == 0 for n in weight.shape)
        return whole and one is not head and name != HEAD

    with installed("float8", "float8"), without_remarks():
        torchao: Any = import_module("torchao.float8")
        config = torchao.Float8LinearConfig.from_recipe_name(recipe)
        config = replace(config, enable_fsdp_float8_all_gather=all_gather)
        found = torchao.convert_to_float8_training(module, config=config, module_filter_fn=converts)
    return cast(nn.Module, found)
