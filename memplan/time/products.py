"""How long a matrix product takes: tiles and waves, on curves fitted to products measured on GPUs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any, Final, final

from memplan.arrays import as_floats, namespace
from memplan.checks import checked_choice, checked_count
from memplan.errors import InvalidValue
from memplan.files import toml_table
from memplan.hardware import DTYPES, Gpu
from memplan.hardware import gpu as known_gpu
from memplan.time.borrowing import lender_of
from memplan.units import TB, TFLOP

PRODUCTS: Final = "time/products.toml"
"""The table of curves: one for each GPU and format that was measured."""

TILES: Final = ((64, 64), (128, 64), (128, 128), (256, 128), (256, 256))
"""Shapes (rows, columns) of what one thread block computes; each is also used turned round."""

SPLITS: Final = (1, 2, 4, 8, 16)
"""Into how many parts the sum over k may be split, each for blocks of its own."""

STEP_OF_K: Final = 64
"""A tile's sum over k goes in steps of as many elements."""

ITEM_BYTES: Final = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""Bytes of an operand's element in each format of `memplan.hardware.DTYPES`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What the time of a product follows from, on one GPU in one format.

    Attributes:
        launch_us: microseconds that every product takes.
        tflop_per_s: the most that all multiprocessors reach together.
        tile_rates: the fraction of it that tiles of each of `TILES` reach.
        start_us: microseconds that each wave of tiles takes beside its products.
        store_us: microseconds that a wave takes to write 128 x 128 results on each multiprocessor.
        split_us: microseconds of adding up the parts of a sum over k that was split.
        memory_tb_per_s: rate at which operands are read and the result is written.
        overlap: the exponent p with which both are joined: (products^p + memory^p)^(1/p).
        whole_waves: how much of its idle multiprocessors the last wave of tiles costs: 1, a whole wave.
        idle_gain: by which fraction a product is faster that leaves (almost) all multiprocessors idle.
        slowdown: by which fraction a product of e times more than 30 us is slower: clocks fall under load.
        cast_us, cast_row_ns, cast_tb_per_s: of casting x to fp8 before: in all, at least for each row, and
            the rate for its elements; 0 for other formats.
    """

    launch_us: float
    tflop_per_s: float
    tile_rates: tuple[float, ...]
    start_us: float
    store_us: float
    split_us: float
    memory_tb_per_s: float
    overlap: float
    whole_waves: float
    idle_gain: float
    slowdown: float
    cast_us: float = 0.0
    cast_row_ns: float = 0.0
    cast_tb_per_s: float = 0.0


BRIEF_US: Final = 30.0
"""Microseconds of a product from which on clocks fall."""


def product_us(
    curve: Curve, multiprocessors: int, item_bytes: int, m: Any, n: Any, k: Any, *, least: bool = False
) -> Any:
    """Microseconds of products [m, k] x [k, n], numbers or equal arrays of them.

    `least`: as if all tiles were full and of the fastest kind, which is never above the microseconds, and
    convex in each size.

    The result is cut into tiles, which the multiprocessors compute in waves, each of which takes the time of
    one tile. Of all tiles and splits of k the fastest is taken, as cuBLAS's heuristics try to.

    Neglects: alignment, and which of the operands is transposed.
    """
    m, n, k = as_floats(m, n, k)
    xp = namespace(m)
    fastest = curve.tflop_per_s * max(curve.tile_rates) * TFLOP
    least_us = _us(2 * m * n * k, fastest)
    if not least:
        least_us = xp.maximum(least_us, reduce(xp.minimum, _tiled_us(curve, multiprocessors, m, n, k)))
    moved_us = _us(item_bytes * (m * k + k * n) + 2 * m * n, curve.memory_tb_per_s * TB)
    joined_us = least_us * (1 + (moved_us / least_us) ** curve.overlap) ** (1 / curve.overlap)
    joined_us = joined_us * (1 + curve.slowdown * xp.log(xp.maximum(1.0, joined_us / BRIEF_US)))
    return joined_us + curve.launch_us + _cast_us(curve, m, k)


def _tiled_us(curve: Curve, multiprocessors: int, m: Any, n: Any, k: Any) -> Iterator[Any]:
    """Microseconds with each tile, and each split of k."""
    xp = namespace(m)
    depths = {split: xp.ceil(k / (split * STEP_OF_K)) * STEP_OF_K for split in SPLITS}
    parts_us = {
        split: curve.split_us + _us(4 * split * m * n, curve.memory_tb_per_s * TB) if split > 1 else 0.0
        for split in SPLITS
    }
    for tile, of_peak in zip(TILES, curve.tile_rates, strict=True):
        rate = curve.tflop_per_s * of_peak / multiprocessors
        for rows, columns in dict.fromkeys((tile, tile[::-1])):
            tiles = xp.ceil(m / rows) * xp.ceil(n / columns)
            store_us = curve.store_us * rows * columns / 128**2
            for split, depth in depths.items():
                filled = tiles * split / multiprocessors
                waves = xp.maximum(1, filled) * (1 - curve.whole_waves) + xp.ceil(filled) * curve.whole_waves
                waves = waves * (1 - curve.idle_gain * xp.maximum(0, 1 - filled))
                one_us = curve.start_us + store_us + _us(2 * rows * columns * depth, rate * TFLOP)
                yield waves * one_us + parts_us[split]


def _us(amount: Any, per_s: Any) -> Any:
    return amount / per_s * 1e6


def _cast_us(curve: Curve, m: Any, k: Any) -> Any:
    if not curve.cast_tb_per_s:
        return 0.0
    row_us = namespace(m).maximum(curve.cast_row_ns / 1e3, _us(3 * k, curve.cast_tb_per_s * TB))
    return curve.cast_us + m * row_us


def product_s(gpu: Gpu | str, dtype: str, m: int, n: int, k: int) -> float:
    """Seconds of one matrix product [m, k] x [k, n], as `torch.nn.functional.linear` runs it.

    `dtype` is a format of `memplan.hardware.DTYPES`; with fp8 the time includes casting x. A format or a GPU
    that was not measured has the curve of the one it borrows from, scaled by their peak rates
    (`curve_of`).

    Source: `time/products.toml`.

    Raises:
        InvalidValue, UnknownName: sizes that are no positive integers, an unknown GPU or format, or one
            whose peak rate is not known.

    >>> f"{product_s('h100-sxm', 'bf16', 8192, 8192, 8192) * 1e6:.0f} us"
    '1351 us'
    """
    found = known_gpu(gpu) if isinstance(gpu, str) else gpu
    return _product_s(found, checked_choice("dtype", dtype, DTYPES), *_checked(m=m, n=n, k=k))


def _checked(**sizes: int) -> tuple[int, ...]:
    return tuple([checked_count(name, size, least=1, most=2**40) for name, size in sizes.items()])


@lru_cache(maxsize=65536)
def _product_s(gpu: Gpu, dtype: str, m: int, n: int, k: int) -> float:
    curve, multiprocessors = curve_of(gpu, dtype)
    return float(product_us(curve, multiprocessors, ITEM_BYTES[dtype], m, n, k)) * 1e-6


@lru_cache(maxsize=256)
def curve_of(gpu: Gpu, dtype: str) -> tuple[Curve, int]:
    """The curve of a GPU in a format, and the number of multiprocessors that it is for.

    A GPU without a curve has its lender's, with rates scaled as the peak rates of both are, and the bytes per
    second as those of their memories; a format without one has that of bf16, scaled alike.

    Raises:
        InvalidValue: no peak rate is known of the GPU in this format.
    """
    lender = lender_of(gpu, "products")
    table = toml_table(PRODUCTS)
    measured = dtype if f"{lender.name}/{dtype}" in table else "bf16"
    curve = _curve(f"{lender.name}/{measured}")
    own, peak = (getattr(one, f"{of}_flops_per_s") for one, of in ((gpu, dtype), (lender, measured)))
    if not own or not gpu.memory_bytes_per_s:
        raise InvalidValue(
            f"no peak rate is known of {gpu.name} in {dtype}, or none of its memory; use a Gpu that states "
            "both."
        )
    compute, memory = own / peak, gpu.memory_bytes_per_s / (lender.memory_bytes_per_s or 1)
    multiprocessors = gpu.multiprocessors or lender.multiprocessors
    scaled = replace(
        curve,
        tflop_per_s=curve.tflop_per_s * compute,
        store_us=curve.store_us / memory,
        memory_tb_per_s=curve.memory_tb_per_s * memory,
        cast_tb_per_s=curve.cast_tb_per_s * memory,
    )
    return scaled, multiprocessors


def _curve(name: str) -> Curve:
    entry = toml_table(PRODUCTS)[name]
    fields = {key: value for key, value in entry.items() if key in Curve.__slots__}
    return Curve(**fields | {"tile_rates": tuple(entry["tile_rates"])})
