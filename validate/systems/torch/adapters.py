"""Adapters as people train them: PEFT's, beside frozen weights that bitsandbytes may hold in few bits."""

from importlib import import_module
from typing import Any, cast
from warnings import catch_warnings, simplefilter

import torch
from torch import nn

from memplan import Plan
from memplan.adapters import Adapters
from memplan.errors import PlanRefused
from memplan.shapes import FP32
from memplan.tracing.adapters import OUTLIER, lora_config
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
    head = module.get_output_embeddings()
    for name, one in list(module.named_modules()):
        if type(one) is nn.Linear and one is not head:
            made = _quantized(one, asked.quantize)
            options = {key: value for key, value in vars(made.weight).items() if key != "data"}
            weight = torch.empty(one.weight.shape, dtype=one.weight.dtype, device="cpu")
            with device:  # not on `meta`, where the rest is made
                found = type(made.weight)(weight, requires_grad=False, **options)
                made.weight = found.to(device).to("cpu")
            made.bias = one.bias
            module.set_submodule(name, made)
    torch.cuda.empty_cache()
    setattr(module, "is_loaded_in_8bit" if asked.quantize == "int8" else "is_loaded_in_4bit", True)


def _quantized(linear: nn.Linear, how: str) -> Any:
    """bitsandbytes' linear in this one's place, as transformers makes it; its weight is yet to come."""
    own = _imported("bitsandbytes").nn
    sizes: Any = {"bias": linear.bias is not None, "device": "meta"}
    if how == "int8":
        shape = linear.in_features, linear.out_features
        return own.Linear8bitLt(*shape, has_fp16_weights=False, threshold=OUTLIER, **sizes)
    return own.Linear4bit(
        linear.in_features,
        linear.out_features,
        compute_dtype=linear.weight.dtype,
        compress_statistics=how == "nf4-double",
        quant_type="nf4",
        **sizes,
    )


def scales_of(module: nn.Module) -> list[torch.Tensor]:
    """What is held beside quantized weights: their scales, and the values of their codes.

    The first pass moves the scales of weights in eight bits to their linear's state.
    """
    in_eight = [cast(Any, one) for one in module.modules() if hasattr(getattr(one, "weight", None), "SCB")]
    held = [one.weight.SCB if one.state.SCB is None else one.state.SCB for one in in_eight]
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
