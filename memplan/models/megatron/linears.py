"""The products of layers, by the layers' implementation and precision."""

from memplan.models.megatron import fp8
from memplan.models.megatron.config import TransformerConfig
from memplan.models.megatron.layers import (
    column_linear,
    norm,
    row_linear,
    te_column_linear,
    te_norm_column_linear,
    te_row_linear,
)
from memplan.tape import Tensor


def norm_column_linear(
    x: Tensor, norm_name: str, name: str, n_out: int, config: TransformerConfig, *, bias: bool
) -> Tensor:
    """A norm and the product by columns after it; `norm_name`: of Megatron's own, which is a module apart."""
    if config.fp8 is not None:
        return fp8.norm_column_linear(x, name, n_out, config, config.fp8, bias=bias)
    if config.transformer_impl == "transformer_engine":
        return te_norm_column_linear(x, name, n_out, config, bias=bias)
    h = norm(x, norm_name, config)
    weight = x.tape.parameter(f"{name}.weight", (n_out, x.shape[-1]))
    of_bias = x.tape.parameter(f"{name}.bias", (n_out,)) if bias else None
    return column_linear(h, weight, name, config, bias=of_bias)


def column_parallel_linear(
    x: Tensor, name: str, n_out: int, config: TransformerConfig, *, save_original_input: bool = False
) -> Tensor:
    """The product by columns, without a bias; `save_original_input`: see `row_parallel_linear`."""
    if config.fp8 is not None:
        return fp8.column_linear(x, name, n_out, config, config.fp8, save_original_input=save_original_input)
    if config.transformer_impl == "transformer_engine":
        return te_column_linear(x, name, n_out, config)
    return column_linear(x, x.tape.parameter(f"{name}.weight", (n_out, x.shape[-1])), name, config)


def row_parallel_linear(
    x: Tensor, name: str, n_out: int, config: TransformerConfig, *, save_original_input: bool = False
) -> Tensor:
    """The product by rows; the caller adds the bias.

    `save_original_input`: in 8 bits it saves x itself, which something else saves anyway, or which is
    computed again.

    Source: megatron.core.extensions.transformer_engine:set_save_original_input.
    """
    if config.fp8 is not None:
        return fp8.row_linear(x, name, n_out, config, config.fp8, save_original_input=save_original_input)
    if config.transformer_impl == "transformer_engine":
        return te_row_linear(x, name, n_out, config)
    return row_linear(x, x.tape.parameter(f"{name}.weight", (n_out, x.shape[-1])), name, config)
