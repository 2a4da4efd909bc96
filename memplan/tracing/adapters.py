"""A module of transformers with PEFT's adapters, and with linears whose frozen weights are of few bits.

PEFT's own code makes the adapters and runs. Of bitsandbytes only what its products allocate is played, by
PyTorch's operations on tensors without data, so that neither it nor a GPU is needed.
"""

from importlib import import_module
from typing import Any, Final, cast
from warnings import catch_warnings, simplefilter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memplan.adapters import ALL_LINEAR, Adapters
from memplan.errors import InvalidValue, MissingRule, installed, reason

BLOCK: Final = 64
"""Weights that share a scale (`blocksize` of `bitsandbytes.functional.quantize_4bit`)."""

OUTER_BLOCK: Final = 256
"""Scales that share one of their own where they are quantized too (`state2.blocksize`)."""

CODES: Final = 16, 256
"""The values of four bits, and of eight."""

FLOAT: Final = 4
"""Bytes of a float32."""

OUTLIER: Final = 6.0
"""From this size on an input's element, and all its column, is left out of a product in eight bits.

Source: `transformers.utils.quantization_config:BitsAndBytesConfig` (`llm_int8_threshold`).
"""

INT8_MULTIPLE: Final = 8
"""What divides the sizes of a weight in eight bits.

Source: aten/src/ATen/native/cuda/Blas.cpp (`_int_mm_out_cuda`); bitsandbytes multiplies inputs of widths that
4 does not divide in float32.
"""


def with_adapters(module: Any, asked: Adapters, compute: torch.dtype) -> nn.Module:
    """A module of transformers whose weights are frozen, in the type of products, with PEFT's adapters.

    Where linears are quantized, all other weights are in float32, as `prepare_model_for_kbit_training` leaves
    them.

    Source: `peft.utils.other:prepare_model_for_kbit_training`, `peft.mapping_func:get_peft_model`.

    Raises:
        InvalidValue: names of no module.
        MissingPackage: PEFT is not installed.
    """
    module.to(compute)
    if asked.quantize != "none":
        _quantize(module, compute, asked.quantize)
        module.requires_grad_(False)
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.float32)
    with catch_warnings():
        simplefilter("ignore")  # of a property that transformers renames, and of what PEFT puts right
        try:
            return cast(nn.Module, _peft().get_peft_model(module, lora_config(asked, module)))
        except ValueError as error:
            weighted = [name for name, one in module.named_parameters() if one.dim() == 2]
            known = sorted({name.split(".")[-2] for name in weighted})
            raise InvalidValue(
                f"lora_targets={asked.targets!r}, modules_to_save={asked.saved!r}: {reason(error)} "
                f"(PEFT); use all-linear, or names of {', '.join(known)}."
            ) from None


def lora_config(asked: Adapters, module: nn.Module) -> Any:
    """PEFT's configuration of adapters; those of quantized linears have a class of their own."""
    targets = asked.targets if asked.targets == ALL_LINEAR else asked.targets.split(",")
    made = _peft().LoraConfig(
        r=asked.rank,
        target_modules=targets,
        lora_dropout=asked.dropout,
        use_dora=asked.dora,
        modules_to_save=asked.saved.split(",") if asked.saved else None,
        task_type="CAUSAL_LM",
    )
    if any(isinstance(one, QuantizedLinear) for one in module.modules()):
        made._register_custom_module({QuantizedLinear: _quantized_lora()})
    return made


def _peft() -> Any:
    with installed("LoRA", "lora"):
        return import_module("peft")


def _quantize(module: Any, compute: torch.dtype, how: str) -> None:
    """Replace all linears but the head.

    Raises:
        MissingRule: a module of transformers' Conv1D, as GPT-2 is.

    Source: transformers.integrations.bitsandbytes (`replace_with_bnb_linear`), transformers.quantizers.base
    (`get_keys_to_not_convert`), `bitsandbytes.functional:name2qmap`.
    """
    head, double = module.get_output_embeddings(), how == "nf4-double"
    for name, one in list(module.named_modules()):
        if type(one).__name__ == "Conv1D":  # which transformers quantizes too
            raise MissingRule(
                f"quantize={how!r} of {type(module).__name__}, whose products are Conv1D of transformers and "
                "not torch.nn.Linear, has no rule yet; use another model, or quantize='none'.",
                kind="quantized weights of GPT-2's Conv1D",
            )
        if type(one) is nn.Linear and one is not head:
            eight = how == "int8"
            made = EightBitLinear(one) if eight else FourBitLinear(one, compute, double=double)
            module.set_submodule(name, made)
    if double:  # of all weights together
        module.dynamic_map = _bytes(CODES[1] * FLOAT)


class QuantizedLinear(nn.Linear):
    """A linear whose frozen weight is of few bits: for tensors without data."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.bias = linear.bias


class FourBitLinear(QuantizedLinear):
    """A linear whose weight is of four bits, with scales.

    Source: `bitsandbytes.nn.modules:Linear4bit`, `bitsandbytes.functional:quantize_4bit` (0.50).
    """

    def __init__(self, linear: nn.Linear, compute: torch.dtype, *, double: bool) -> None:
        super().__init__(linear)
        self.compute, self.nested = compute, double
        n = linear.weight.numel()
        self.n_scales = -(-n // BLOCK)
        self.weight = _bytes(-(-n // 2), 1)
        self.quant_map = _bytes(CODES[0] * FLOAT)
        self.absmax = _bytes(self.n_scales * (1 if double else FLOAT))
        if double:
            self.offset = _bytes(FLOAT)
            self.nested_absmax = _bytes(-(-self.n_scales // OUTER_BLOCK) * FLOAT)
            self.nested_quant_map = _bytes(CODES[1] * FLOAT)

    def forward(self, x: Tensor) -> Tensor:
        """The product, computed in one type and returned in the input's."""
        bias = None if self.bias is None else self.bias.to(self.compute)
        shape = self.out_features, self.in_features
        n_scales = self.n_scales if self.nested else 0
        y = cast(Any, _Product).apply(x.to(self.compute), self.weight, n_scales, shape, bias)
        return cast(Tensor, y.to(x.dtype))


class EightBitLinear(QuantizedLinear):
    """A linear whose weight is of eight bits, with a scale for each output.

    Source: `bitsandbytes.nn.modules:Linear8bitLt` (0.50), without `has_fp16_weights`.

    Raises:
        MissingRule: sizes that cuBLAS does not multiply in eight bits; a bias in another type than the
            input, to whose type the first pass casts it for good.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        shape = self.out_features, self.in_features
        if any(n % INT8_MULTIPLE for n in shape):
            raise MissingRule(
                f"quantize='int8' of a weight of {shape[0]} x {shape[1]}, which is no multiple of "
                f"{INT8_MULTIPLE}, has no rule yet; use quantize='nf4'.",
                kind="a weight in 8 bits of odd sizes",
            )
        self.weight = _bytes(*shape)
        self.scales = _bytes(self.out_features * FLOAT)

    def forward(self, x: Tensor) -> Tensor:
        """The product, in the input's type."""
        if self.bias is not None and self.bias.dtype != x.dtype:
            raise MissingRule(
                "quantize='int8' of a linear with a bias, whose input is in another type, has no rule yet; "
                "use quantize='nf4', or precision='bf16'.",
                kind="a bias beside a weight in 8 bits, of another type than the input",
            )
        return cast(Tensor, cast(Any, _EightBitProduct).apply(x, self.weight, self.bias))


def _bytes(*shape: int) -> nn.Parameter:
    """A frozen tensor of so many bytes, which no precision casts and DDP does not send at each pass."""
    return nn.Parameter(torch.empty(shape, dtype=torch.uint8, device="meta"), requires_grad=False)


class _Product(torch.autograd.Function):
    """The product with a weight of four bits, which is made whole for it in either pass; it saves no input.

    `n_scales`: scales that are quantized themselves, and made floats for it.

    Source: `bitsandbytes.autograd._functions:MatMul4Bit`; bitsandbytes/backends/cuda/ops.py
    (`_dequant_linear_fallback`), for more than 1,536 tokens; fewer may have a kernel that needs no copy.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, n_scales: int, shape: Any, bias: Any) -> Tensor:
        ctx.shape, ctx.tensors = shape, (weight, n_scales)
        scales = _scales(n_scales, x.device)
        scales += [one + 1.0 for one in scales]
        whole = torch.empty(shape, dtype=x.dtype, device=x.device)
        found = F.linear(x, whole, bias)
        del scales, whole
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (_, n_scales) = grads, ctx.tensors
        return torch.matmul(grad, _whole(n_scales, ctx.shape, grad)), None, None, None, None


class _EightBitProduct(torch.autograd.Function):
    """The product of inputs and a weight in eight bits; no input reaches the threshold of an outlier.

    The autograd node holds the input as an attribute, not as a saved tensor: it lives until the backward pass
    is over, and recomputing the block does not free it.

    Source: `bitsandbytes.autograd._functions:MatMul8bitLt`; bitsandbytes/backends/default/ops.py
    (`int8_scaled_mm`); bitsandbytes/backends/cuda/ops.py (`int8_mm_dequant`).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        narrow, scales = _in_eight_bits(rows.to(torch.float16))
        sums = torch._int_mm(narrow, weight.view(torch.int8).t())
        product = sums.to(torch.float16)
        if bias is not None:
            product.add_(bias)
        ctx.shape, ctx.weight = x.shape, weight
        ctx.input = rows if ctx.needs_input_grad[0] else None
        found = product.to(x.dtype)
        del narrow, scales  # not before
        return found.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        rows = grad.reshape(-1, grad.shape[-1]).contiguous()
        whole = torch.empty(ctx.weight.shape, dtype=rows.dtype, device=rows.device)
        whole.mul_(torch.empty(len(whole), 1, dtype=torch.float32, device=rows.device))
        return torch.matmul(rows, whole).view(ctx.shape), None, None


def _in_eight_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in eight bits, and their scales; a mask of outliers is made beside them.

    Source: bitsandbytes/backends/cuda/ops.py (`int8_vectorwise_quant`).
    """
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    found = x.to(torch.int8)
    outliers = x.abs() >= OUTLIER
    outliers.any()
    return found, scales


def _scales(n: int, device: torch.device) -> list[Tensor]:
    """The scales of a weight as floats, where they are quantized; without their offset."""
    return [torch.empty(n, dtype=torch.float32, device=device)] if n else []


def _whole(n_scales: int, shape: Any, like: Tensor) -> Tensor:
    """A weight as it is for the backward pass, whose scales are gone when it is there.

    Source: `bitsandbytes.functional:dequantize_4bit`.
    """
    scales = _scales(n_scales, like.device)
    found = torch.empty(shape, dtype=like.dtype, device=like.device)
    del scales
    return found


def _quantized_lora() -> Any:
    """PEFT's class of adapters beside quantized linears, of which it makes its own where bitsandbytes is.

    Source: `peft.tuners.lora.layer:Linear`; peft/tuners/lora/bnb.py (`Linear4bit`, `Linear8bitLt`).
    """
    layer: Any = import_module("peft.tuners.lora.layer")

    def init(self: Any, base: nn.Module, name: str, config: Any, **options: Any) -> None:
        nn.Module.__init__(self)
        layer.LoraLayer.__init__(self, base)
        self.fan_in_fan_out = False
        self._active_adapter = name
        self.update_layer(name, options["r"], lora_alpha=options["lora_alpha"], config=config)

    return type("QuantizedLora", (nn.Module, layer.LoraLayer), {"__init__": init, "forward": _lora_forward})


def _lora_forward(self: Any, x: Tensor) -> Tensor:
    """The output of a quantized linear, and of its adapters if they are on.

    Source: peft/tuners/lora/bnb.py (`Linear4bit.forward`, `Linear8bitLt.forward`).
    """
    result: Tensor = self.base_layer(x)
    if self.disable_adapters:
        return result
    if isinstance(self.base_layer, FourBitLinear):
        result = result.clone()
    for name in self.active_adapters:
        a, b = self.lora_A[name], self.lora_B[name]
        dropout, scaling = self.lora_dropout[name], self.scaling[name]
        converts, expected = not torch.is_autocast_enabled(), result.dtype
        if converts:
            x = self._cast_input_dtype(x, a.weight.dtype)
        output = b(a(dropout(x))) * scaling
        if converts:
            output = output.to(expected)
        result = result + output
    return result
