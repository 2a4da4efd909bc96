"""Adapters as people train them: PEFT's, beside frozen weights that bitsandbytes may hold in four bits."""

from importlib import import_module
from typing import Any, cast
from warnings import catch_warnings, simplefilter

import torch
from torch import nn

from memplan import Plan
from memplan.adapters import Adapters
from memplan.errors import PlanRefused
from memplan.shapes import FP32
from memplan.tracing.adapters import lora_config
from validate.systems.torch.parallelize import torch_dtype


def with_adapters(module: Any, plan: Plan, asked: Adapters, device: torch.device) -> nn.Module:
    """The module with the plan's adapters; its own weights are frozen, in the type of products.

    Quantized, it is made on the device, and all that is not quantized is in float32 if adapters are, as PEFT
    prepares it.

    Raises:
        PlanRefused: PEFT or bitsandbytes is not installed; bitsandbytes runs on GPUs.
    """
    module.to(torch_dtype(plan.formats.compute))
    with catch_warnings():
        simplefilter("ignore")  # of a property that transformers renames, and of what PEFT puts right
        peft = _imported("peft")
        if asked.quantize != "none":
            _quantize(module, asked, device)
            if plan.formats.stored == FP32:
                peft.prepare_model_for_kbit_training(module, use_gradient_checkpointing=False)
        return cast(nn.Module, peft.get_peft_model(module, lora_config(asked, module)))


def _quantize(module: Any, asked: Adapters, device: torch.device) -> None:
    """Hold the weights of all linears but the head's as bitsandbytes does, quantized on the device.

    They wait on the host until all weights come to the device in the module's order.
    """
    if device.type == "cpu":
        raise PlanRefused(f"quantize={asked.quantize!r} is run on GPUs; use a GPU, or --device nogpu.")
    own, head = _imported("bitsandbytes").nn, module.get_output_embeddings()
    for name, one in list(module.named_modules()):
        if type(one) is nn.Linear and one is not head:
            made = own.Linear4bit(
                one.in_features,
                one.out_features,
                bias=one.bias is not None,
                compute_dtype=one.weight.dtype,
                compress_statistics=asked.quantize == "nf4-double",
                quant_type="nf4",
                device="meta",
            )
            options = {key: value for key, value in vars(made.weight).items() if key != "data"}
            weight = torch.empty(one.weight.shape, dtype=one.weight.dtype, device="cpu")
            with device:  # not on `meta`, where the rest is made
                made.weight = own.Params4bit(weight, requires_grad=False, **options).to(device).to("cpu")
            made.bias = one.bias
            module.set_submodule(name, made)
    torch.cuda.empty_cache()
    module.is_loaded_in_4bit = True


def scales_of(module: nn.Module) -> list[torch.Tensor]:
    """What is held beside quantized weights: their scales, and the values of their codes."""
    held: list[torch.Tensor] = []
    for weight in module.parameters():
        state = getattr(weight, "quant_state", None)
        if state is not None:
            nested = [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
            held += [state.code, state.absmax, *nested]
    if any(one.dtype == torch.uint8 for one in held):  # scales quantized by one map
        held += _imported("bitsandbytes").functional.name2qmap.values()
    return held


def _imported(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise PlanRefused(f"{package} is not installed; pip install {package}.") from error
