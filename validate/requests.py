"""Random requests of PyTorch's CUDA caching allocator, with each of its settings and limits: what it said.

They are drawn by a seed, so that a record of them is small: whoever reads it draws them again.
"""

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from random import Random
from typing import Any, Final

import torch

from memplan.allocator import AllocatorConfig, Block, CachingAllocator, OutOfMemory
from memplan.errors import InvalidValue
from memplan.hardware import gpu
from memplan.units import KiB, MiB
from validate.nogpu import MEANING, environment_for

CONFS: Final = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:40",
    "garbage_collection_threshold:0.6",
    "max_split_size_mb:21,garbage_collection_threshold:0.3",
    "expandable_segments:True,max_split_size_mb:40",
    "expandable_segments:True,garbage_collection_threshold:0.5",
)

LIMIT_BYTES: Final = 700 * MiB
"""So little that a third of the programs give back what is cached, and some ask for more than there is."""

SIZES: Final = (
    1, 512, 1 * KiB, 700 * KiB, 1 * MiB, 1 * MiB + 1, 3 * MiB, 9 * MiB, 10 * MiB, 21 * MiB + 3, 55 * MiB,
    130 * MiB,
)  # fmt: skip
"""At the borders of the allocator's rules, and between them."""

N_STREAMS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """An allocator: its configuration, the driver's bytes, and what the process may have of them."""

    alloc_conf: str
    limit_bytes: int | None = None
    allowed_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """An allocation of `n_bytes` on a stream, or the free of the `freed`-th of the tensors alive."""

    n_bytes: int = 0
    stream: int = 0
    freed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What an allocator has said of a program: its peaks, and a checksum of its figures after each request.

    These are the bytes allocated and reserved, and how often cached ones were given back; `n_refused` are the
    requests that it had no memory for.
    """

    allocated_bytes: int
    reserved_bytes: int
    n_retries: int
    n_refused: int
    checksum: int


Figures = tuple[int, int, int]
"""Bytes allocated and reserved now, and how often cached ones were given back so far."""


def settings() -> Iterator[Setting]:
    """Each configuration without a limit, with the process limited, and on a GPU that has no more."""
    for conf in CONFS:
        yield Setting(alloc_conf=conf)
        yield Setting(alloc_conf=conf, allowed_bytes=LIMIT_BYTES)
        yield Setting(alloc_conf=conf, limit_bytes=LIMIT_BYTES)


class Program:
    """Requests drawn by a seed: which tensors are alive when one is freed depends on what was refused."""

    def __init__(self, seed: int) -> None:
        self._random = random = Random(seed)
        drawn = (*SIZES, random.randrange(1, 40 * MiB), random.randrange(1, 3 * MiB))
        self._sizes = [random.choice(drawn) for _ in range(8)]
        self.n_requests = random.choice((30, 60, 200))

    def next(self, n_alive: int) -> Request:
        """The next request if `n_alive` tensors are alive."""
        if n_alive and self._random.random() < 0.48:
            return Request(freed=self._random.randrange(n_alive))
        return Request(self._random.choice(self._sizes), self._random.choice((0, 0, 0, 1)))


def said(figures: Sequence[Figures], n_refused: int) -> Said:
    """What is kept of an allocator's figures after each request."""
    return Said(
        allocated_bytes=max(allocated for allocated, _, _ in figures),
        reserved_bytes=max(reserved for _, reserved, _ in figures),
        n_retries=figures[-1][2],
        n_refused=n_refused,
        checksum=zlib.crc32(repr(list(figures)).encode()),
    )


def of_memplan(program: Program, setting: Setting, *, takes_oldest: bool = False) -> Said:
    """What memplan's allocator says of a program; `takes_oldest`: that of torch 2.12."""
    allocator = CachingAllocator(
        AllocatorConfig.parse(setting.alloc_conf),
        limit_bytes=setting.limit_bytes,
        allowed_bytes=setting.allowed_bytes,
        takes_oldest=takes_oldest,
    )
    alive: list[Block] = []
    figures: list[Figures] = []
    n_refused = 0
    for _ in range(program.n_requests):
        request = program.next(len(alive))
        if request.freed is not None:
            allocator.free(alive.pop(request.freed))
        else:
            try:
                alive.append(allocator.malloc(request.n_bytes, f"stream {request.stream}"))
            except OutOfMemory:
                n_refused += 1
        figures.append((allocator.allocated_bytes, allocator.reserved_bytes, allocator.n_retries))
    return said(figures, n_refused)


def n_equal(record: Mapping[str, Any]) -> int:
    """In how many programs of a line of `record_requests` memplan's figures equal PyTorch's."""
    setting = Setting(**{field.name: record[field.name] for field in fields(Setting)})
    takes_oldest = record["environment"]["torch"].startswith("2.12.")
    return sum(
        of_memplan(Program(seed), setting, takes_oldest=takes_oldest) == Said(**said)
        for seed, said in enumerate(record["said"])
    )


def record_requests(gpu_name: str, n_programs: int) -> Iterator[dict[str, Any]]:
    """For each setting, what PyTorch's allocator says of `n_programs` on a GPU that is not there."""
    environment = environment_for(gpu(gpu_name))
    for setting in settings():
        yield {
            "environment": {"torch": torch.__version__, "gpu": gpu_name, "meaning": MEANING},
            **asdict(setting),
            "said": _asked(setting, n_programs, environment),
        }


def _asked(setting: Setting, n_programs: int, environment: Mapping[str, str]) -> list[dict[str, int]]:
    here = dict(os.environ) | dict(environment) | {"PYTORCH_CUDA_ALLOC_CONF": setting.alloc_conf}
    here["PYTHONPATH"] = os.pathsep.join(sys.path)
    if setting.limit_bytes is not None:
        here["MEMPLAN_NOGPU_BYTES"] = str(setting.limit_bytes)
    command = [sys.executable, "-m", __name__, str(n_programs), str(setting.allowed_bytes or 0)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=here)
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise InvalidValue(f"PyTorch's allocator could not be asked with {setting}: {last}")
    found: list[dict[str, int]] = json.loads(ended.stdout.splitlines()[-1])
    return found


def _of_torch(program: Program, streams: Sequence[Any]) -> Said:
    """What the allocator of this process says of a program."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()["num_alloc_retries"]
    alive: list[torch.Tensor] = []
    figures: list[Figures] = []
    n_refused = 0
    for _ in range(program.n_requests):
        request = program.next(len(alive))
        if request.freed is not None:
            del alive[request.freed]
        else:
            try:
                with torch.cuda.stream(streams[request.stream]):
                    alive.append(torch.empty(request.n_bytes, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                n_refused += 1
        stats = torch.cuda.memory_stats()
        figures.append(
            (
                stats["allocated_bytes.all.current"],
                stats["reserved_bytes.all.current"],
                stats["num_alloc_retries"] - before,
            )
        )
    return said(figures, n_refused)


def _serve(n_programs: int, allowed_bytes: int) -> None:
    """Prints what the allocator of this process says of each program, as JSON."""
    if allowed_bytes:
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(allowed_bytes / total_bytes)
    streams = [torch.cuda.default_stream(), *[torch.cuda.Stream() for _ in range(N_STREAMS - 1)]]
    print(json.dumps([asdict(_of_torch(Program(seed), streams)) for seed in range(n_programs)]))


def read_requests(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of `record_requests`."""
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
