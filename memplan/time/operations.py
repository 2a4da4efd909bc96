"""How long what a record says is computed takes: each `memplan.record.Compute` on one GPU."""

from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any, Final, final

from memplan.files import toml_table
from memplan.hardware import Gpu
from memplan.record import Compute, ComputeKind
from memplan.shapes import Shape
from memplan.time.attention import FlashRelease, attention_s
from memplan.time.borrowing import lender_of
from memplan.time.products import ITEM_BYTES, curve_of, product_us
from memplan.units import TB, TFLOP

SUSTAINED: Final = "time/sustained.toml"
"""The table of how much of its brief rate each GPU sustains over hours of training."""


@final
class Operations:
    """The seconds of computations on one GPU whose products are in one format.

    `least`: never above the seconds, and convex in the micro-batch (`memplan.time.products.product_us`);
    `flash`: the release of FlashAttention that runs, whatever torch chooses.

    Raises:
        InvalidValue, MissingRule: no rate is known of the GPU in that format.
    """

    def __init__(self, gpu: Gpu, matmul: str, *, least: bool, flash: FlashRelease | None) -> None:
        self.gpu, self.matmul, self.least, self.flash = gpu, matmul, least, flash
        self.curve, self.multiprocessors = curve_of(gpu, matmul)
        self.memory_bytes_per_s = self.curve.memory_tb_per_s * TB
        shares = toml_table(SUSTAINED)[lender_of(gpu, "products").name]
        self.sustained: float = shares["of_products"]
        self.sustained_in_fp8: float = shares.get("of_scaled_products", self.sustained)
        self._known: dict[tuple[Any, ...], float] = {}

    def seconds(self, event: Compute) -> float:
        """Seconds of a computation."""
        key = event.kind, event.operands, event.flops, event.moved_bytes, event.n_kernels
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._seconds(event)
        return found

    def _seconds(self, event: Compute) -> float:
        kind = event.kind
        if kind is ComputeKind.MEMORY:
            launches_s = event.n_kernels * self.curve.launch_us * 1e-6
            return launches_s + event.moved_bytes / self.memory_bytes_per_s
        if kind is ComputeKind.UNKNOWN or not event.operands:  # a convolution in a trace of the first format
            return self._flops_s(event.flops)
        if kind in (ComputeKind.ATTENTION, ComputeKind.ATTENTION_BACKWARD):
            return self._attention_s(event.operands, backward=kind is ComputeKind.ATTENTION_BACKWARD)
        return self._product_s(*sizes_of(kind, event.operands), kind)

    def _flops_s(self, flops: int) -> float:
        """Seconds of FLOPs of which no more is known: at the rate of the fastest tiles."""
        return flops / (self.curve.tflop_per_s * max(self.curve.tile_rates) * self.sustained * TFLOP)

    def _attention_s(self, operands: tuple[Shape, ...], *, backward: bool) -> float:
        (batch, seq, n_heads, d_head), key, *_ = operands
        sizes = batch, max(seq, key[1]), n_heads, key[2], d_head
        found = attention_s(self.gpu, *sizes, backward=backward, flash=self.flash, dtype=self.matmul)
        return found / self.sustained

    def _product_s(self, m: int, n: int, k: int, kind: ComputeKind) -> float:
        """Seconds of a product; convolutions in float32 are in TF32 where the GPU has it.

        Casts before a product in float8 are kernels of their own.

        Source: torch.backends.cudnn, whose `allow_tf32` is True.
        """
        matmul = self.matmul
        if kind is ComputeKind.CONVOLUTION and matmul == "fp32" and self.gpu.tf32_flops_per_s:
            matmul = "tf32"
        is_scaled = kind is ComputeKind.SCALED_MM
        matmul = "fp8" if is_scaled else matmul
        curve, multiprocessors = curve_of(self.gpu, matmul)
        if is_scaled:
            curve = replace(curve, cast_us=0.0, cast_row_ns=0.0, cast_tb_per_s=0.0)
        found = product_us(curve, multiprocessors, ITEM_BYTES[matmul], m, n, k, least=self.least)
        return float(found) * 1e-6 / (self.sustained_in_fp8 if is_scaled else self.sustained)


@lru_cache(maxsize=64)
def operations_of(gpu: Gpu, matmul: str, least: bool, flash: FlashRelease | None) -> Operations:
    """The one `Operations` of a GPU, a format and a purpose, which remembers what it was asked."""
    return Operations(gpu, matmul, least=least, flash=flash)


def sizes_of(kind: ComputeKind, operands: tuple[Shape, ...]) -> tuple[int, int, int]:
    """m, n and k of a product of whole operands: batches and groups are rows of one product.

    >>> sizes_of(ComputeKind.MM, ((2, 3), (3, 4))), sizes_of(ComputeKind.BMM, ((5, 2, 3), (5, 3, 4)))
    ((2, 4, 3), (10, 4, 3))
    >>> sizes_of(ComputeKind.CONVOLUTION, ((16, 3, 5, 5), (2, 16, 8, 8)))
    (128, 16, 75)
    """
    left, right, *_ = operands
    if kind is ComputeKind.CONVOLUTION:
        return right[0] * prod(right[2:]), left[0], prod(left[1:])
    if kind is ComputeKind.GROUPED_MM and len(left) == len(right) == 2:
        return left[0], right[1], left[1]
    return prod(left[:-1]), right[-1], left[-1]
