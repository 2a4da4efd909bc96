"""Writes memplan/time/{products,attention,collectives}.toml: curves fitted to what others measured on GPUs.

    python data/fit_rates.py FOLDER

FOLDER holds gemm.csv.xz, attention.csv.xz, nccl.csv and nodes.csv, which are not part of this project: data
of NVIDIA's aiconfigurator (Apache-2.0) and Vidur (MIT), with columns as named in `products`, `attention` and
`collectives`. A fifth of the shapes of products and of attention, by a checksum, is never fitted; the
residuals beside each curve are theirs.
"""

import csv
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

import memplan
from memplan.hardware import gpu
from memplan.time.attention import AttentionCurve, forward_us
from memplan.time.collectives import Line, wire_share
from memplan.time.products import ITEM_BYTES, Curve, product_us

Columns = NDArray[np.float64]
Row = dict[str, str]

GPUS: Final = {
    "a100_sxm": "a100-80-sxm",
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "gb200": "gb200",
    "gb300": "gb300",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000",
    "a100_dgx": "a100-80-sxm",
    "h100_dgx": "h100-sxm",
}
"""The files' names of GPUs, and memplan's."""

FOLDER: Final = Path(memplan.__file__).parent / "time"
RETRIEVED: Final = "retrieved = 2026-11-26"
SMALLEST_STEP: Final = 0.004


# --- Fitting ----------------------------------------------------------------------------------------------


def kept_back(shape: Iterable[float]) -> bool:
    """Whether a shape is never fitted: a fifth of them."""
    return zlib.crc32(",".join(f"{size:.0f}" for size in shape).encode()) % 5 == 0


def fitted(start: Columns, loss: Callable[[Columns], float], highest: Columns, lowest: Columns) -> Columns:
    """The parameters at which no single step of a factor up or down makes the loss smaller.

    Steps grow while they help and shrink where they do not. Parameters that are 0 stay 0.
    """
    best, least = start.copy(), loss(start)
    steps = np.where(start > 0, 0.3, 0.0)
    while steps.max() > SMALLEST_STEP:
        for i in np.flatnonzero(steps > SMALLEST_STEP):
            for factor in (np.exp(steps[i]), np.exp(-steps[i])):
                tried = best.copy()
                tried[i] = min(max(tried[i] * factor, lowest[i]), highest[i])
                if (found := loss(tried)) < least:
                    best, least = tried, found
                    steps[i] *= 1.5
                    break
            else:
                steps[i] *= 0.5
    return np.array([float(f"{value:.4g}") if value > 1e-6 else 0.0 for value in best])


def off(predicted_us: Columns, measured_us: Columns, weights: Columns) -> float:
    """What is made small: mean and root mean square of the logarithms' differences."""
    each = np.abs(np.log(predicted_us / measured_us))
    return float(np.average(each, weights=weights) + 0.3 * np.average(each**2, weights=weights) ** 0.5)


def residuals(label: str, errors: Columns) -> list[str]:
    """The lines that say how far predictions were from shapes that were kept back."""
    middle, high = np.quantile(errors, [0.5, 0.9])
    return [
        f"kept_back_{label} = {len(errors)}",
        f"median_error_{label} = {middle:.3f}",
        f"error_90_{label} = {high:.3f}",
    ]


def values(curve: Curve | AttentionCurve) -> list[str]:
    """The lines of a curve's fields; those with their default are left out."""
    found = [(f.name, getattr(curve, f.name)) for f in fields(curve) if getattr(curve, f.name) != f.default]
    return [f"{name} = {list(value) if isinstance(value, tuple) else value}" for name, value in found]


def source_of(rows: Sequence[Row]) -> str:
    """The line that says where measurements come from."""
    return f'source = "NVIDIA aiconfigurator (Apache-2.0), {rows[0]["source"]}, of 2026; data/fit_rates.py"'


# --- Products ---------------------------------------------------------------------------------------------

LIMITS: Final = {"overlap": (1.0, 20.0), "whole_waves": (0.0, 1.0), "idle_gain": (0.0, 1.0)}
"""What values of a curve's fields mean anything, where not all above 0 do."""

SCALARS: Final = [f.name for f in fields(Curve) if f.name != "tile_rates"]


def _curve(numbers: Columns) -> Curve:
    n = len(SCALARS)
    own = dict(zip(SCALARS, numbers[:n].tolist(), strict=True))
    return Curve(**own, tile_rates=tuple(numbers[n:].tolist()))


def products(rows: Sequence[Row], name: str, dtype: str) -> list[str]:
    """The entry of one GPU and format, from rows with m, n, k and latency_us."""
    columns = np.array([[float(row[c]) for c in ("m", "n", "k", "latency_us")] for row in rows]).T
    shapes, measured_us = columns[:3], columns[3]
    back = np.array([kept_back(shape) for shape in shapes.T])
    large = np.min(shapes, axis=0) >= 256
    drawn = np.random.default_rng(0).random(len(back))
    used = ~back & np.where(large, drawn < 0.5, drawn < 0.15)
    weights = np.where(large[used], 1.0, 0.5)
    own, item_bytes = gpu(name), ITEM_BYTES[dtype]

    def us(numbers: Columns, which: Columns) -> Columns:
        return product_us(_curve(numbers), own.multiprocessors, item_bytes, *which)

    peak, memory = getattr(own, f"{dtype}_flops_per_s") / 1e12, (own.memory_bytes_per_s or 0.0) / 1e12
    fp8 = float(dtype == "fp8")
    start = {
        "launch_us": 3.0, "tflop_per_s": 0.85 * peak, "start_us": 0.3, "store_us": 0.5, "split_us": 2.0,
        "memory_tb_per_s": 0.85 * memory, "overlap": 3.0, "whole_waves": 0.5, "idle_gain": 0.1,
        "slowdown": 0.01, "cast_us": 4.0 * fp8, "cast_row_ns": 5.0 * fp8, "cast_tb_per_s": memory * fp8 / 2,
    }  # fmt: skip
    limits = [LIMITS.get(name, (0.0, np.inf)) for name in SCALARS] + [(0.0, 1.0)] * 5
    lowest, highest = np.array(limits).T
    best = fitted(
        np.array([*[start[name] for name in SCALARS], 0.4, 0.6, 0.8, 0.95, 0.95]),
        lambda numbers: off(us(numbers, shapes[:, used]), measured_us[used], weights),
        highest,
        lowest,
    )
    errors = np.abs(us(best, shapes) / measured_us - 1)
    return [
        f'["{name}/{dtype}"]',
        *values(_curve(best)),
        *residuals("large", errors[back & large]),
        *residuals("small", errors[back & ~large]),
        source_of(rows),
        RETRIEVED,
    ]


# --- Attention --------------------------------------------------------------------------------------------


def attention(rows: Sequence[Row], name: str) -> list[str]:
    """The entry of one GPU, from rows with sizes and latency_us and without a window."""
    sizes = ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim")
    columns = np.array([[float(row[c]) for c in (*sizes, "latency_us")] for row in rows]).T
    shapes, measured_us = columns[:5], columns[5]
    back = np.array([kept_back(shape) for shape in shapes.T])
    large = (shapes[1] >= 2048) & (shapes[0] * shapes[2] >= 16)
    weights = np.where(large[~back], 1.0, 0.3)
    names = [f.name for f in fields(AttentionCurve)]
    measured = {f"tflop_per_s_{d:.0f}" for d in set(shapes[4])}
    others = {"launch_us": 6.0, "start_us": 1.0, "tail": 0.5, "memory_tb_per_s": 1.5}
    start = np.array([others.get(n, 300.0 * (n in measured)) for n in names])

    def curve(numbers: Columns) -> AttentionCurve:
        return AttentionCurve(**dict(zip(names, numbers.tolist(), strict=True)))

    def us(numbers: Columns, which: Columns) -> Columns:
        return forward_us(curve(numbers), gpu(name).multiprocessors, *which)

    best = fitted(
        start,
        lambda numbers: off(us(numbers, shapes[:, ~back]), measured_us[~back], weights),
        np.full(len(names), np.inf),
        np.zeros(len(names)),
    )
    errors = np.abs(us(best, shapes) / measured_us - 1)
    return [
        f"[{name}]",
        *values(curve(best)),
        *residuals("large", errors[back & large]),
        *residuals("small", errors[back & ~large]),
        source_of(rows),
        RETRIEVED,
    ]


# --- Collectives ------------------------------------------------------------------------------------------


def three_lines(wire_bytes: Columns, measured_us: Columns) -> tuple[list[list[float]], float]:
    """Three lines [latency_us, gb_per_s], the least of which are the times, and their median error."""
    most = float(np.max(wire_bytes / measured_us)) / 1e3
    least = float(np.min(measured_us))
    start = np.array([least, most / 15, 2 * least, most / 3, 4 * least, most])

    def us(numbers: Columns) -> Columns:
        lines = [Line(*numbers[i : i + 2].tolist()) for i in (0, 2, 4)]
        return np.min([[line.us(n) for n in wire_bytes] for line in lines], axis=0)

    best = fitted(
        start, lambda numbers: off(us(numbers), measured_us, np.ones(len(measured_us))),
        np.full(6, np.inf), np.zeros(6),
    )  # fmt: skip
    pairs = sorted([best[i : i + 2].tolist() for i in (0, 2, 4)])
    return pairs, float(np.median(np.abs(us(best) / measured_us - 1)))


def collectives(rows: Sequence[Row], sends: Sequence[Row], name: str) -> list[str]:
    """The entry of one GPU, from rows of collectives (2-byte elements) and of sends (bytes) within a node."""
    newest = max([row["nccl"] for row in rows], key=lambda release: [int(n) for n in release.split(".")])
    lines, errors = [f"[{name}]"], []
    rows = [row for row in rows if row["nccl"] == newest]
    for theirs in dict.fromkeys(row["op_name"] for row in rows):
        kind = {"alltoall": "all_to_all"}.get(theirs, theirs)
        for n in sorted({int(row["num_gpus"]) for row in rows}):
            own = [row for row in rows if (row["op_name"], row["num_gpus"]) == (theirs, str(n))]
            wire = np.array([2 * float(row["message_size"]) * wire_share(kind, n) for row in own])
            found, error = three_lines(wire, np.array([float(row["latency_us"]) for row in own]))
            lines.append(f"{kind}_{n} = {found}")
            errors.append(error)
    if sends:
        sizes = np.array([float(row["size"]) for row in sends])
        found, error = three_lines(sizes, np.array([float(row["latency_us"]) for row in sends]))
        lines.append(f"send_2 = {found}")
        errors.append(error)
    whence = "; sends: Vidur (MIT), 2024" if sends else ""
    return [
        *lines,
        f"median_error = {np.median(errors):.3f}",
        f'source = "NVIDIA aiconfigurator (Apache-2.0), NCCL {newest}{whence}; data/fit_rates.py"',
        RETRIEVED,
    ]


# --- The tables -------------------------------------------------------------------------------------------

HEADERS: Final = {
    "products": """\
# Curves of matrix products, for each GPU and format that was measured: fields of memplan.time.products.Curve.
#   kept_back_large, kept_back_small   shapes that were not fitted: m, n, k all at least 256; the others
""",
    "attention": """\
# Curves of causal attention's forward pass in bf16: the fields of memplan.time.attention.AttentionCurve.
#   kept_back_large, kept_back_small   shapes not fitted: at least 2,048 tokens, 16 heads in all; the others
""",
    "collectives": """\
# Collectives within a node: for each operation and number of GPUs three lines [latency_us, gb_per_s sent].
#   median_error   the median over operations and sizes of groups of the lines' own median errors, all fitted
""",
}
RESIDUALS: Final = """\
#   median_error_*, error_90_*         median and 90th percentile of |predicted / measured - 1| on those
"""


def rows_of(path: Path) -> list[Row]:
    """The rows of a CSV file, which may be compressed."""
    data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    return list(csv.DictReader(io.StringIO(data.decode())))


def by_gpu(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each GPU of `GPUS`, by memplan's name."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["gpu"] in GPUS:
            found.setdefault(GPUS[row["gpu"]], []).append(row)
    return found


def written(table: str, entries: Iterable[list[str]]) -> None:
    """Write a table of the package."""
    note = "" if table == "collectives" else RESIDUALS
    head = f"{HEADERS[table]}{note}# Written by data/fit_rates.py.\n"
    text = "\n\n".join("\n".join(entry) for entry in entries)
    (FOLDER / f"{table}.toml").write_text(f"{head}\n{text}\n", encoding="utf-8")


def main(folder: Path) -> None:
    """Write the three tables."""
    of_nodes = [
        row
        for row in rows_of(folder / "nodes.csv")
        if (row["op"], row["num_workers"], row["devices_per_node"]) == ("send_recv", "2", "2")
    ]
    sends = by_gpu(of_nodes)
    nccl = by_gpu(rows_of(folder / "nccl.csv"))
    written("collectives", [collectives(rows, sends.get(name, ()), name) for name, rows in nccl.items()])
    passes = by_gpu(r for r in rows_of(folder / "attention.csv.xz") if float(r["window_size"] or 0) == 0)
    written("attention", [attention(rows, name) for name, rows in passes.items()])
    formats = {"bfloat16": "bf16", "fp8": "fp8"}
    written(
        "products",
        [
            products(own, name, dtype)
            for name, rows in by_gpu(rows_of(folder / "gemm.csv.xz")).items()
            for theirs, dtype in formats.items()
            if (own := [row for row in rows if row["gemm_dtype"] == theirs])
        ],
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
