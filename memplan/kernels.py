"""Scratch bytes of CUDA kernels beside their operands and results, which follow from shapes and the GPU.

Read from the kernels' sources, and confirmed by PyTorch 2.13's CUDA build without a GPU (`validate.nogpu`).
"""

from math import ceil
from typing import Final, NamedTuple

from memplan.device import Device
from memplan.errors import MissingRule
from memplan.shapes import DType, Shape

Release = tuple[int, int]
"""A release of PyTorch."""

SCALED_MM_MULTIPLE: Final = 16
"""What divides each dim of the operands of `torch._scaled_mm`."""

ALIGNED_BYTES: Final = 256
"""CUB aligns each of its arrays to this."""

SORTED_IDS: Final = 3072
"""Up to this many token ids an embedding's gradient is summed without sorting them."""

ROWS_PER_THREAD: Final = 10
"""Rows of one id that one thread sums (`NROWS_PER_THREAD`)."""

MANY_ROWS: Final = 65536
"""Up to this many rows a norm's weight gradients are summed in one step."""


class ReductionScratch(NamedTuple):
    """The scratch of a sum over one dim: partial sums, and a counter for each group of blocks."""

    sums_bytes: int
    counters_bytes: int


def reduction_scratch(
    device: Device, n_outputs: int, n_inputs: int, *, along_rows: bool = True
) -> ReductionScratch | None:
    """The scratch of a kernel that sums `n_inputs` numbers for each of `n_outputs`; None if it needs none.

    It is needed where several blocks share an output. `along_rows`: the outputs lie next to each other in
    memory, as for a bias gradient, where the inputs of one output are a row apart; otherwise the inputs do.

    >>> from memplan.device import A100
    >>> reduction_scratch(A100, 768, 4096), reduction_scratch(A100, 768, 512)
    (ReductionScratch(sums_bytes=25165824, counters_bytes=24), None)

    Source: aten/src/ATen/native/cuda/Reduce.cuh (`setReduceConfig`, `ReduceConfig.global_memory_size`).
    """
    most_threads, vector = 512, 1
    if along_rows:
        vector = next(size for size in (4, 2, 1) if n_outputs % size == 0)
        most_threads //= vector
        wide, high = n_outputs // vector, n_inputs
    else:
        wide, high = n_inputs // 4 if n_inputs >= 128 else n_inputs, n_outputs
    wide, high = (min(most_threads, _power_of_two_in(size)) for size in (wide, high))
    height = min(high, most_threads // min(wide, 32))
    width = min(wide, most_threads // height)
    step_in, step_out = (1, width) if along_rows else (width, 1)
    if ceil(n_inputs / step_in) < min(16 * height, 256):
        return None
    step_in *= height
    each = ceil(n_inputs / step_in)
    grid = ceil(n_outputs // vector / step_out)
    target = device.multiprocessors * (device.threads_per_multiprocessor // (width * height))
    if each < 256 or grid > target:
        return None
    blocks = max(min(ceil(target / grid), ceil(each / 16)), ceil(each / 256))
    if blocks == 1:
        return None
    shares = width * vector if along_rows else 1
    return ReductionScratch(4 * n_outputs * blocks * shares, 4 * grid)


def norm_scratch(device: Device, n_elements: int, *, itemsize: int = 8) -> tuple[int, ...]:
    """Bytes of each scratch buffer of a tensor's norm, in float64 by default; empty if it needs none.

    Tensors of 2 GiB or more are halved for 32-bit indices.

    >>> from memplan.device import H100
    >>> norm_scratch(H100, 349_446_656), norm_scratch(H100, 512)
    ((10672, 4), ())

    Source: aten/src/ATen/native/cuda/Reduce.cuh (`gpu_reduce_kernel`: `with_32bit_indexing`).
    """
    if device.on_cpu:
        return ()
    while n_elements * itemsize >= 2**31:
        n_elements -= n_elements // 2
    found = reduction_scratch(device, 1, n_elements, along_rows=False)
    return () if found is None else (found.sums_bytes // 4 * itemsize, found.counters_bytes)


def _power_of_two_in(n: int) -> int:
    """The largest power of two up to n, at least 1."""
    return 1 << max(n, 1).bit_length() - 1


def partial_rows(device: Device, n_rows: int, width: int) -> int:
    """Rows of partial sums that a norm's weight gradient is computed from; 0 if it is summed in one step.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu (`LaunchGammaBetaBackwardCUDAKernel`).
    """
    if n_rows <= MANY_ROWS or width // 32 >= device.multiprocessors // 2:
        return 0
    return min(ceil(n_rows / 32), 2**20 // width)


def flash_splits(device: Device, batch: int, n_heads: int, n_queries: int, d_head: int, n_keys: int) -> int:
    """The number of parts that FlashAttention divides the keys into, so that all multiprocessors have work.

    >>> from memplan.device import A100
    >>> flash_splits(A100, 1, 12, 512, 64, 512), flash_splits(A100, 1, 12, 512, 64, 77)
    (2, 1)

    Source: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (`set_params_splitkv`,
    `num_splits_heuristic`).
    """
    columns = 256 if d_head <= 64 else 128 if d_head <= 128 else 64
    n_columns, n_blocks = ceil(n_keys / columns), batch * n_heads * ceil(n_queries / 64)
    places = 2 * device.multiprocessors
    if n_blocks >= 0.8 * places:
        return 1
    efficiencies = {}
    for n in range(1, min(128, places, n_columns) + 1):
        if n == 1 or ceil(n_columns / n) != ceil(n_columns / (n - 1)):
            waves = n_blocks * n / places
            efficiencies[n] = waves / ceil(waves)
    best = max(efficiencies.values())
    return next(n for n, efficiency in efficiencies.items() if efficiency >= 0.85 * best)


def efficient_attention_bytes(device: Device, itemsize: int, n_queries: int, d_head: int, n_keys: int) -> int:
    """Bytes that memory-efficient attention accumulates gradients in, for one head of one sequence.

    Source: aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h (`workspace_size`:
    tiles of `GradQTempStorage`, and gradients of keys and values that do not stay in registers).
    """
    rows, columns = _gradient_tile(device, itemsize, d_head)
    tile = 4 * rows * columns + 16
    queries = ceil(n_queries / rows) * ceil(d_head / columns) * tile
    if itemsize == 4 or d_head <= rows:
        return queries
    return queries + 2 * 4 * ceil(n_keys / columns) * columns * ceil(d_head / 128) * 128


def _gradient_tile(device: Device, itemsize: int, d_head: int) -> tuple[int, int]:
    """Rows and columns of the tiles that memory-efficient attention divides gradients into.

    Raises:
        MissingRule: for compute capability 12.0, where the first tiles that fit into its shared memory are
            taken, which nobody has measured.

    Source: aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernels/generate_kernels.py
    (`BwdKernel.get_all`).
    """
    if device.at_least(11):
        raise MissingRule(
            f"memory-efficient attention on {device.name or 'this GPU'} (compute capability 12.0) has no "
            "rule here, which float32 and masks of windows take; use precision='bf16-mixed', and a seq_len "
            "within the window.",
            kind="memory-efficient attention on compute capability 12.0",
        )
    cramped = device.capability in ((8, 6), (8, 9))
    roomy = device.at_least(8) and not cramped
    if itemsize == 4:
        return 128 if roomy and d_head > 64 else 64, 64
    if d_head <= 64 or (cramped and 96 < d_head <= 128):
        return 64, 64
    return 128, 128 if roomy and d_head <= 128 else 64


class CudnnScratch(NamedTuple):
    """Bytes of the workspace that cuDNN's attention allocates at once, in each pass."""

    forward_bytes: int
    backward_bytes: int


def cudnn_scratch(
    device: Device, torch_release: Release, q_shape: Shape, kv_shape: Shape, dtype: DType, *, dropout: bool
) -> CudnnScratch:
    """The workspaces of cuDNN's attention: arrays of the engine that it chooses, and its frontend's.

    In backward the frontend keeps each row's dot product and, but for Blackwell's wide heads, a float32
    accumulator for dq. Engines keep dk and dv for each head of grouped queries, for those wide heads three
    float32 arrays; on Blackwell also a second accumulator for dq of short sequences, and in both passes a bit
    for each score that dropout may drop.

    >>> from memplan.device import H100
    >>> from memplan.shapes import BF16
    >>> cudnn_scratch(H100, (2, 13), (1, 512, 8, 64), (1, 512, 2, 64), BF16, dropout=False)
    CudnnScratch(forward_bytes=256, backward_bytes=2113792)

    Source: cudnn_frontend/node/scaled_dot_product_flash_attention.h (`SDPABackwardNode`); for engines, 23,612
    plans that cuDNN 9.19 to 9.26 made ahead of time for an H100, an H200 and a B200 (`validate.nogpu`).
    """
    batch, n_queries, n_heads, d_head = q_shape
    _, n_keys, n_kv_heads, _ = kv_shape
    n_all_heads, blackwell = batch * n_heads, device.at_least(10)
    wide = blackwell and d_head > 128
    shortest = n_keys if torch_release >= (2, 15) else min(n_queries, n_keys)
    frontend = 4 * n_all_heads * n_queries * (1 if wide else d_head + 1)
    kept, made = [], []
    if blackwell and dropout:
        kept.append(n_all_heads * ceil(n_queries / 128) * ceil(n_keys / 128) * 128 * 128 // 8)
    elif blackwell and shortest <= 128 and not wide:
        made.append(4 * n_all_heads * ceil(n_queries / 8) * 8 * d_head)
    if n_kv_heads != n_heads:
        made += [n_all_heads * n_keys * d_head * (4 if wide else dtype.itemsize)] * (3 if wide else 2)
    return CudnnScratch(_engine_bytes(device, kept), frontend + _engine_bytes(device, kept + made))


def _engine_bytes(device: Device, arrays: list[int]) -> int:
    """Bytes of an engine's arrays, each aligned to 128, and 256 more on Hopper; on Blackwell 128 if any."""
    aligned = sum(ceil(n_bytes / 128) * 128 for n_bytes in arrays)
    if device.at_least(10):
        return aligned + 128 if aligned else 0
    return aligned + 256


def sums_by_id(device: Device, n_ids: int, n_parts: int, width: int) -> bool:
    """Whether an embedding's gradient is summed for each of few ids at once, instead of for each part.

    `n_ids` different ids, whose rows are summed in `n_parts` parts. Seen in PyTorch's allocations, from 2.12
    to 2.13, on three GPUs: the parts' sums are more than four blocks of threads for each block of ids, and
    the blocks do not fill the GPU four times.
    """
    threads = ceil(width / 32) * 32
    n_blocks = ceil(n_ids * threads / min(threads, 1024))
    return 4 * n_blocks < n_parts and n_blocks < 4 * device.multiprocessors


def id_sort_passes(torch_release: Release, n_rows: int) -> int:
    """Passes of the sort of a table's row numbers: over the bits that one can have; before 2.13 over all 64.

    Source: aten/src/ATen/native/cuda/Embedding.cu (`embedding_dense_backward_cuda`).
    """
    return ceil((n_rows.bit_length() or 1) / 8) if torch_release >= (2, 13) else 8


def radix_sort_bytes(device: Device, n_elements: int, n_passes: int = 8) -> int:
    """Bytes that CUB allocates to sort integers of 64 bits with their places, 8 bits in each pass.

    Neglects: other versions of CUB, whose tiles differ by a few KiB.

    Source: cub/device/dispatch/dispatch_radix_sort.cuh (`InvokeOnesweep`), as CUDA 13.0 tunes it.
    """
    sorted_at_once = 4608 if device.at_least(9) else 3840 if device.at_least(8) else 2816
    between_passes = 2 * _aligned(8 * n_elements) if n_passes > 1 else 0
    tiles = _aligned(1024 * ceil(n_elements / sorted_at_once))
    return ALIGNED_BYTES - 1 + between_passes + _aligned(2048 * n_passes) + tiles + ALIGNED_BYTES


def unique_bytes(device: Device, n_elements: int) -> int:
    """Bytes that CUB allocates to find the different ones of sorted integers of 64 bits.

    Source: as `scan_bytes`.
    """
    return _tile_states(
        n_elements, 4928 if device.at_least(9) else 1344 if device.capability == (8, 0) else 320
    )


def scan_bytes(n_elements: int, *, of_int32: bool = False) -> int:
    """Bytes that CUB allocates for a cumulative sum of `n_elements`, of 8 bytes each, or of int32.

    Source: cub/agent/single_pass_scan_operators.cuh (`ScanTileState`), as CUDA 13.0 tunes them.
    """
    return _tile_states(n_elements, 1920, 8) if of_int32 else _tile_states(n_elements, 896)


def _tile_states(n_elements: int, tile: int, state_bytes: int = 16) -> int:
    return ALIGNED_BYTES - 1 + ALIGNED_BYTES + _aligned(state_bytes * (ceil(n_elements / tile) + 32))


def _aligned(n_bytes: int) -> int:
    return ceil(n_bytes / ALIGNED_BYTES) * ALIGNED_BYTES


class GroupedProductScratch(NamedTuple):
    """The scratch of a product for each group of rows: the groups' sizes and addresses, and a workspace."""

    arguments_bytes: int
    workspace_bytes: int


def grouped_product_scratch(
    device: Device, n_groups: int, rows: int, columns: int
) -> GroupedProductScratch | None:
    """The scratch of products in bfloat16 by one kernel; None where each group's product is computed alone.

    `rows` and `columns` are of one group's product, the rows on average. On a B200 two multiprocessors share
    a tile of a product that is larger than 128 in both.

    >>> from memplan.device import H100
    >>> grouped_product_scratch(H100, 8, 512, 14336)
    GroupedProductScratch(arguments_bytes=480, workspace_bytes=67584)

    Source: aten/src/ATen/native/cuda/GroupMM.cu (`bf16bf16_grouped_gemm_impl_sm90_sm100`,
    `dispatch_bf16_grouped_kernel_on_tile_size`); bytes for each multiprocessor as CUTLASS asks for them.
    """
    if not device.at_least(9) or device.at_least(11):
        return None
    of_multiprocessor = 512
    if device.at_least(10):
        of_multiprocessor = 5888 if min(rows, columns) > 128 else 5376
    arguments = 24 * (n_groups + n_groups % 2) + 36 * n_groups
    return GroupedProductScratch(arguments, of_multiprocessor * device.multiprocessors)


LT_WORKSPACE_BYTES: Final = 2**20
"""cuBLASLt's workspace, for products with a bias: in torch 2.11, and from 2.15 on; else it is cuBLAS's.

Source: aten/src/ATen/cuda/CublasHandlePool.cpp (`getCUDABlasLtWorkspaceSize`,
`unified_cublas_and_lt_workspaces`).
"""

FREES_WORKSPACES: Final[Release] = (2, 15)
"""From here on a product's workspace is freed when the product is done; before, it stays for the next ones.

Source: ATen/cuda/CUDAContextLight.h (`CUDABlasHandleWithWorkspace`).
"""


def product_workspace_bytes(device: Device, torch_release: Release) -> int:
    """Bytes of cuBLAS's workspace; there is one for each stream and thread that multiplies matrices.

    >>> from memplan.device import A100, H100
    >>> [product_workspace_bytes(device, (2, 13)) / 2**20 for device in (A100, H100)]
    [8.125, 32.0]

    Neglects: AMD's size, which is taken to be that of earlier NVIDIA GPUs; CUBLAS_WORKSPACE_CONFIG.

    Source: aten/src/ATen/cuda/CublasHandlePool.cpp (`parseChosenWorkspaceSize`).
    """
    hopper, blackwell = device.at_least(9), device.at_least(10)
    if hopper and (not blackwell or torch_release >= (2, 12)):
        return 32 * 2**20
    return 2 * 4 * 2**20 + 8 * 16 * 2**10
