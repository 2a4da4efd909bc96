"""Timings of single operations on a device: matrix products, attention, copies and kernel launches.

A probe is one operation on one shape. It runs until it has been timed for long enough; its median and its
least time are kept. Rates follow from the operation's bytes and FLOPs. On a GPU CUDA's events time it, on its
own stream; on CPU the clock does, on one thread.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from memplan.checks import LARGEST_BYTES as LARGEST_SIZE
from memplan.checks import checked_choice, checked_count, checked_positive
from memplan.errors import InvalidValue, MemplanError, reason
from memplan.files import file_bytes, of_file, shown_path
from memplan.units import KiB, MiB
from validate.lines import open_lines

Kind = Literal["matmul", "attention", "attention backward", "copy", "add", "launch", "synchronize"]

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

WARM_UPS: Final = 3
ENOUGH_S: Final = {"cuda": 0.2, "cpu": 0.02}
"""Total seconds for which a probe is timed, by device."""

MOST_RUNS: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One operation: its shape (`sizes`), its FLOPs, and the bytes that it reads and writes."""

    kind: Kind
    dtype: str
    sizes: Mapping[str, int]
    flops: int = 0
    moved_bytes: int = 0
    prepare: Callable[["Probe", torch.device], Callable[[], object]] = field(compare=False, repr=False)

    @property
    def key(self) -> str:
        """The probe's identity: its kind, sizes and type."""
        return json.dumps([self.kind, self.dtype, dict(self.sizes)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A probe's result: the median and the least seconds of `runs` runs, and the rates at the median."""

    kind: Kind
    dtype: str
    sizes: Mapping[str, int]
    runs: int
    median_s: float
    least_s: float
    flops_per_s: float | None = None
    bytes_per_s: float | None = None

    @property
    def key(self) -> str:
        """The identity of its probe."""
        return json.dumps([self.kind, self.dtype, dict(self.sizes)])

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), allow_nan=False)

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={n}" for name, n in self.sizes.items())
        rates = [f"{self.flops_per_s / 1e12:.4g} TFLOP/s"] if self.flops_per_s else []
        rates += [f"{self.bytes_per_s / 1e12:.4g} TB/s"] if self.bytes_per_s else []
        return f"{self.kind:<20}{self.dtype:<6}{sizes:<44}{self.median_s * 1e6:>12,.1f} us  {' '.join(rates)}"


def matmul(m: int, n: int, k: int, dtype: str) -> Probe:
    """A product of (m, k) and (k, n): 2 m n k FLOPs."""
    return Probe(
        kind="matmul", dtype=dtype, sizes={"m": m, "n": n, "k": k}, flops=2 * m * n * k, prepare=_matmul
    )


def _matmul(probe: Probe, device: torch.device) -> Callable[[], object]:
    m, n, k = (probe.sizes[name] for name in "mnk")
    a, b = (_normal(shape, probe.dtype, device) for shape in ((m, k), (k, n)))
    return lambda: a @ b


def attention(batch: int, heads: int, seq_len: int, d_head: int, dtype: str, *, backward: bool) -> Probe:
    """Causal `scaled_dot_product_attention`; FLOPs of the whole square: 4 b h s^2 d forward, 10 backward.

    Backward is timed with its forward pass: 14 in all.
    """
    sizes = {"batch": batch, "heads": heads, "seq_len": seq_len, "d_head": d_head}
    return Probe(
        kind="attention backward" if backward else "attention",
        dtype=dtype,
        sizes=sizes,
        flops=(14 if backward else 4) * batch * heads * seq_len**2 * d_head,
        prepare=_attention,
    )


def _attention(probe: Probe, device: torch.device) -> Callable[[], object]:
    shape = tuple(probe.sizes[name] for name in ("batch", "heads", "seq_len", "d_head"))
    q, k, v = (_normal(shape, probe.dtype, device) for _ in range(3))
    if probe.kind == "attention":
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for x in (q, k, v):
        x.requires_grad_()
    upstream = torch.ones_like(q)

    def both() -> object:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(y, (q, k, v), upstream)

    return both


def copy(n_bytes: int) -> Probe:
    """A tensor copied to another: read once, written once."""
    return Probe(
        kind="copy", dtype="fp32", sizes={"n_bytes": n_bytes}, moved_bytes=2 * n_bytes, prepare=_copy
    )


def _copy(probe: Probe, device: torch.device) -> Callable[[], object]:
    source = _normal((probe.sizes["n_bytes"] // 4,), probe.dtype, device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def add(n_bytes: int) -> Probe:
    """Two tensors added into a third: two reads, one write."""
    return Probe(kind="add", dtype="fp32", sizes={"n_bytes": n_bytes}, moved_bytes=3 * n_bytes, prepare=_add)


def _add(probe: Probe, device: torch.device) -> Callable[[], object]:
    a, b = (_normal((probe.sizes["n_bytes"] // 4,), probe.dtype, device) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.add(a, b, out=out)


LAUNCHES: Final = 100
"""Kernels that a launch probe starts one after the other."""


def launch(*, synchronized: bool) -> Probe:
    """A hundred tiny kernels; `synchronized`: each waited for."""
    kind: Kind = "synchronize" if synchronized else "launch"
    return Probe(kind=kind, dtype="fp32", sizes={"kernels": LAUNCHES}, prepare=_launch)


def _launch(probe: Probe, device: torch.device) -> Callable[[], object]:
    x = torch.zeros(1, device=device)

    def run() -> None:
        for _ in range(LAUNCHES):
            x.add_(1)
            if probe.kind == "synchronize":
                _wait(device)

    return run


def _normal(shape: Sequence[int], dtype: str, device: torch.device) -> Tensor:
    return torch.randn(tuple(shape), device=device).to(DTYPES[dtype])


def probes(device: torch.device) -> Iterator[Probe]:
    """All probes of a device: on a GPU shapes of models of 100M to 405B, on CPU the smallest of each kind."""
    if device.type == "cpu":
        yield from (matmul(n, n, n, dtype) for n in (64, 256) for dtype in ("fp32", "bf16"))
        yield from (attention(1, 4, 64, 16, "fp32", backward=backward) for backward in (False, True))
        yield from (copy(MiB), add(MiB))
        yield from (launch(synchronized=synchronized) for synchronized in (False, True))
        return
    for dtype in DTYPES:
        yield from (matmul(n, n, n, dtype) for n in (128, 256, 512, 1024, 2048, 4096, 8192))
    for tokens in (512, 2048, 8192):
        for d, d_ff in ((768, 3072), (2048, 8192), (4096, 14_336), (8192, 28_672), (16_384, 53_248)):
            yield from (matmul(tokens, n, k, "bf16") for n, k in ((d, d), (d_ff, d), (d, d_ff)))
            yield matmul(tokens, d_ff // 8, d, "bf16")
    yield from (matmul(tokens, 128_256, 4096, "bf16") for tokens in (2048, 8192))
    for seq_len in (512, 1024, 2048, 4096, 8192, 16_384, 32_768):
        for heads, d_head in ((12, 64), (32, 128)):
            for backward in (False, True):
                yield attention(1, heads, seq_len, d_head, "bf16", backward=backward)
    yield from (attention(1, 12, seq_len, 64, "fp32", backward=True) for seq_len in (1024, 4096))
    for n_bytes in (256 * KiB, MiB, 4 * MiB, 16 * MiB, 64 * MiB, 256 * MiB, 1024 * MiB, 4096 * MiB):
        yield from (copy(n_bytes), add(n_bytes))
    yield from (launch(synchronized=synchronized) for synchronized in (False, True))


def timed(probe: Probe, device: torch.device) -> Timing:
    """A probe run until it has been timed for long enough."""
    run = probe.prepare(probe, device)
    for _ in range(WARM_UPS):
        run()
    _wait(device)
    enough_s, seconds = ENOUGH_S[device.type], list[float]()
    while math.fsum(seconds) < enough_s and len(seconds) < MOST_RUNS:
        seconds.append(_seconds(run, device))
    middle_s = median(seconds)
    return Timing(
        kind=probe.kind,
        dtype=probe.dtype,
        sizes=probe.sizes,
        runs=len(seconds),
        median_s=_significant(middle_s),
        least_s=_significant(min(seconds)),
        flops_per_s=_significant(probe.flops / middle_s) if probe.flops else None,
        bytes_per_s=_significant(probe.moved_bytes / middle_s) if probe.moved_bytes else None,
    )


def _significant(value: float) -> float:
    return float(f"{value:.5g}")


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        start_s = time.perf_counter()
        run()
        return time.perf_counter() - start_s
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


LARGEST_BYTES: Final = 2**26
"""A calibration has some hundred lines."""

STARTS: Final = (b'{"kind":', b'{"environment":')
"""The beginnings of the lines in a file of timings."""


def timings(content: bytes, path: Path) -> list[Timing]:
    """The timings of a file's whole lines.

    Raises:
        InvalidValue: a line that is no timing.
    """
    try:
        rows = [json.loads(line) for line in content.splitlines()]
        return [_timing(row) for row in rows if row.keys() != {"environment"}]
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise InvalidValue(
            f"{shown_path(path)} is no calibration ({reason(error)}); use a file of `calibrate --out`."
        ) from None


def read_timings(path: Path) -> list[Timing]:
    """The timings of a file; a last line without its end is left out.

    Raises:
        InvalidValue: a file that cannot be read, or a line that is no timing.
    """
    try:
        content = file_bytes(path, most_bytes=LARGEST_BYTES, what="file of `calibrate --out`")
    except MemplanError as error:
        raise of_file(path, error) from None
    return timings(content[: content.rfind(b"\n") + 1], path)


def _timing(row: Mapping[str, Any]) -> Timing:
    """The timing of a line, each field checked."""
    found = Timing(**row)
    checked_choice("kind", found.kind, get_args(Kind))
    checked_choice("dtype", found.dtype, tuple(DTYPES))
    checked_count("runs", found.runs)
    if not isinstance(found.sizes, dict):
        raise TypeError("its sizes are no object")
    for name, size in found.sizes.items():
        checked_count(name, size, least=0, most=LARGEST_SIZE)
    rates = {name: getattr(found, name) for name in ("flops_per_s", "bytes_per_s")}
    known = {name: rate for name, rate in rates.items() if rate is not None}
    for name, value in ({"median_s": found.median_s, "least_s": found.least_s} | known).items():
        checked_positive(name, value)
    return found


def calibrated(
    device: torch.device, environment: Mapping[str, Any], out: Path | None, *, resume: bool
) -> Iterator[Timing]:
    """Runs the probes that the file lacks, adding each as it is done; yields those of the file too.

    Raises:
        InvalidValue: a file that has timings and is not to be resumed, or that is of something else.
        CannotWrite: a file that cannot be written.
    """
    if out is None:
        yield from _calibrated(device, {}, lambda line: None)
        return
    with open_lines(out, resume=resume, starts=STARTS) as lines:
        known = {timing.key: timing for timing in timings(lines.content, out)}
        lines.cut_torn_line()
        lines.append(json.dumps({"environment": dict(environment)}))
        yield from _calibrated(device, known, lines.append)


def _calibrated(
    device: torch.device, known: Mapping[str, Timing], keep: Callable[[str], None]
) -> Iterator[Timing]:
    torch.set_num_threads(1)
    for probe in probes(device):
        timing = known.get(probe.key)
        if timing is None:
            timing = timed(probe, device)
            keep(timing.to_json())
        yield timing
