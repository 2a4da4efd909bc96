"""How long fused attention takes, on curves fitted to passes measured on GPUs."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, Literal, final

from memplan.arrays import as_floats, namespace
from memplan.checks import checked_choice, checked_count
from memplan.errors import InvalidValue
from memplan.files import toml_table
from memplan.hardware import DTYPES, Gpu
from memplan.hardware import gpu as known_gpu
from memplan.time.borrowing import lender_of
from memplan.units import TB, TFLOP

ATTENTION: Final = "time/attention.toml"
"""The table of curves: one for each GPU that was measured."""

BLOCK: Final = 128
"""Queries and keys of one block; a block on the diagonal is computed whole."""

BACKWARD_RATIO: Final = 2.5 * 0.73 / 0.63
"""A backward pass's seconds over its forward pass's: it has five products in the place of two.

Forward passes reached up to 73 % of an A100's peak, backward passes up to 63 %.

Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, section 4.1.
"""

FLASH_2_ON_HOPPER: Final = 0.35
"""The fraction of an H100's peak that FlashAttention 2 reaches, which does not use what Hopper has anew.

Source: Shah et al. 2024, FlashAttention-3, arXiv:2407.08608, abstract.
"""

FLASH_1_FORWARD: Final = 0.50
FLASH_1_BACKWARD: Final = 0.35
"""The fractions of an A100's peak that FlashAttention 1 reaches: forward 30 to 50 %, backward 25 to 35 %.

Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, section 3.
"""

FlashRelease = Literal[1, 2]
"""A release of FlashAttention."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCurve:
    """What the time of a causal attention's forward pass follows from, on one GPU, in bf16.

    Attributes:
        launch_us: microseconds that every pass takes.
        tflop_per_s_64, tflop_per_s_128, tflop_per_s_256: what all multiprocessors reach together with heads
            of this size, of the FLOPs that are computed; 0: not measured.
        start_us: microseconds that a block of queries takes beside its products.
        tail: how much of the longest block of queries is left when all others are done.
        memory_tb_per_s: rate at which q, k and v are read and the result is written.
    """

    launch_us: float
    tflop_per_s_64: float = 0.0
    tflop_per_s_128: float
    tflop_per_s_256: float = 0.0
    start_us: float
    tail: float
    memory_tb_per_s: float

    def tflop_per_s(self, d_head: Any) -> Any:
        """The rate with heads of a size: on lines between those measured, and beyond as the nearest.

        >>> AttentionCurve(
        ...     launch_us=9, tflop_per_s_64=300, tflop_per_s_128=500, start_us=1, tail=0.5, memory_tb_per_s=1
        ... ).tflop_per_s(96)
        400.0
        """
        measured = {d: getattr(self, f"tflop_per_s_{d}") for d in (64, 128, 256)}
        sizes = [d for d, rate in measured.items() if rate]
        return namespace(d_head).interp(d_head, sizes, [measured[d] for d in sizes])


def forward_us(
    curve: AttentionCurve,
    multiprocessors: int,
    batch: Any,
    seq: Any,
    n_heads: Any,
    n_kv_heads: Any,
    d_head: Any,
    *,
    causal: bool = True,
) -> Any:
    """Microseconds of forward passes, numbers or equal arrays of them.

    A block of queries meets all keys up to its own, or all if it is not causal; blocks are spread evenly over
    multiprocessors.
    """
    batch, seq, n_heads, n_kv_heads, d_head = as_floats(batch, seq, n_heads, n_kv_heads, d_head)
    xp = namespace(batch)
    rate = curve.tflop_per_s(d_head) * TFLOP
    rows = xp.ceil(seq / BLOCK)
    pairs = rows * (rows + 1) / 2 if causal else rows**2
    n_blocks = batch * n_heads * rows
    block_flops = 4 * BLOCK * BLOCK * d_head
    all_us = batch * n_heads * pairs * block_flops / rate * 1e6
    longest_us = rows * block_flops / (rate / multiprocessors) * 1e6
    starts_us = curve.start_us * xp.maximum(1, n_blocks / multiprocessors)
    moved = 4 * batch * seq * (n_heads + n_kv_heads) * d_head
    moved_us = moved / (curve.memory_tb_per_s * TB) * 1e6
    return curve.launch_us + starts_us + xp.maximum(all_us + curve.tail * longest_us, moved_us)


def attention_s(
    gpu: Gpu | str,
    batch: int,
    seq: int,
    n_heads: int,
    n_kv_heads: int,
    d_head: int,
    *,
    causal: bool = True,
    backward: bool = False,
    flash: FlashRelease | None = None,
    dtype: str = "bf16",
) -> float:
    """Seconds of one fused attention over a sequence: its forward or its backward pass.

    The forward pass is measured (FlashAttention 2 on A100 and L40S, 3 on H100 and H200, FlashInfer on B200
    and GB200); the backward pass takes `BACKWARD_RATIO` times as long. A GPU without a curve has that of the
    one it borrows from, scaled by their peak rates, as another format than bf16 is. `flash`: by this release
    of FlashAttention, the first on A100 alone.

    Neglects: sliding windows, dropout, masks.
    Source: `time/attention.toml`.

    Raises:
        InvalidValue, UnknownName: sizes that are no positive integers, an unknown GPU, or one whose peak rate
            is not known; FlashAttention 1 on another GPU than A100.

    >>> f"{attention_s('h100-sxm', 1, 8192, 32, 8, 128) * 1e6:.0f} us"
    '985 us'
    """
    sizes = {
        "batch": batch, "seq": seq, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "d_head": d_head
    }  # fmt: skip
    checked = [checked_count(name, size, least=1, most=2**40) for name, size in sizes.items()]
    found = known_gpu(gpu) if isinstance(gpu, str) else gpu
    known = checked_choice("dtype", dtype, DTYPES)
    forward_s = _forward_s(found, *checked, causal=causal, flash=flash, dtype=known)
    ratio = 2.5 * FLASH_1_FORWARD / FLASH_1_BACKWARD if flash == 1 else BACKWARD_RATIO
    return forward_s * (ratio if backward else 1.0)


@lru_cache(maxsize=65536)
def _forward_s(gpu: Gpu, *sizes: int, causal: bool, flash: FlashRelease | None, dtype: str) -> float:
    curve, multiprocessors = attention_curve_of(gpu, dtype)
    if (most := _most_of_peak(gpu, flash)) is not None and gpu.bf16_flops_per_s:
        most_tflop_per_s = most * gpu.bf16_flops_per_s / TFLOP
        names = [name for name in AttentionCurve.__slots__ if name.startswith("tflop_per_s_")]
        curve = replace(curve, **{name: min(most_tflop_per_s, getattr(curve, name)) for name in names})
    return float(forward_us(curve, multiprocessors, *sizes, causal=causal)) * 1e-6


def _most_of_peak(gpu: Gpu, flash: FlashRelease | None) -> float | None:
    """The fraction of the peak that a release's forward pass reaches at most; None: the curve's own."""
    if flash == 1 and gpu.capability != (8, 0):
        raise InvalidValue(
            f"flash=1 on {gpu.name}: the rate of FlashAttention 1 is known on A100 alone; use flash=2, or "
            "leave it out."
        )
    if flash == 1:
        return FLASH_1_FORWARD
    return FLASH_2_ON_HOPPER if flash == 2 and gpu.capability == (9, 0) else None


@lru_cache(maxsize=256)
def attention_curve_of(gpu: Gpu, dtype: str) -> tuple[AttentionCurve, int]:
    """The curve of a GPU in a format, and the number of multiprocessors that it is for.

    Raises:
        InvalidValue: no peak rate is known of the GPU in this format, or none of its memory.
    """
    lender = lender_of(gpu, "attention")
    entry = toml_table(ATTENTION)[lender.name]
    fields = {key: value for key, value in entry.items() if key in AttentionCurve.__slots__}
    own, peak = getattr(gpu, f"{dtype}_flops_per_s"), lender.bf16_flops_per_s
    if not own or not peak or not gpu.memory_bytes_per_s or not lender.memory_bytes_per_s:
        raise InvalidValue(
            f"no peak rate is known of {gpu.name} in {dtype}, or none of its memory; use a Gpu that states "
            "both."
        )
    memory = gpu.memory_bytes_per_s / lender.memory_bytes_per_s
    rates = {key: value * own / peak for key, value in fields.items() if key.startswith("tflop")}
    scaled = fields | rates | {"memory_tb_per_s": fields["memory_tb_per_s"] * memory}
    return AttentionCurve(**scaled), gpu.multiprocessors or lender.multiprocessors
