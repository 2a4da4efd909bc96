"""The cores and the memory of this machine, for cases that run side by side."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from memplan.errors import InvalidValue, shown_value
from memplan.units import GiB, KiB, MiB, TiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The resources that concurrent cases may use together."""

    cores: int
    memory_bytes: int


def machine_budget(
    cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> Budget:
    """The cores and the memory that this process may use: the machine's, its cgroups' if they have less."""
    folders = list(_folders(cgroups, _text(membership)))
    quotas = [quota for folder in folders if (quota := _cpu_quota(folder)) is not None]
    free = [n_bytes for folder in folders if (n_bytes := _free_bytes(folder)) is not None]
    cores = min([float(len(os.sched_getaffinity(0))), *quotas])
    return Budget(cores=max(1, int(cores)), memory_bytes=min([_available_bytes(), *free]))


def _available_bytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * KiB


def _folders(cgroups: Path, membership: str) -> Iterator[Path]:
    """The folders of this process's cgroup and of those around it, which bound it too.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst. In a container the path may be the host's, which
    is not to be seen, and the root is the container's own.
    """
    for line in membership.splitlines():
        if line.startswith("0::/"):
            inside = cgroups / line[len("0::/") :]
            yield from (folder for folder in (inside, *inside.parents) if folder.is_relative_to(cgroups))


def _cpu_quota(folder: Path) -> float | None:
    words = _words(folder / "cpu.max")
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None


def _free_bytes(folder: Path) -> int | None:
    """The free bytes of a cgroup, its page cache included."""
    limit, used = _words(folder / "memory.max"), _words(folder / "memory.current")
    if not limit or not used or limit[0] == "max":
        return None
    statistics = _words(folder / "memory.stat")
    cached = dict(zip(statistics[::2], statistics[1::2], strict=False)).get("inactive_file", "0")
    return max(0, int(limit[0]) - int(used[0]) + int(cached))


def _words(file: Path) -> list[str]:
    return _text(file).split()


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


UNITS: Final = {"b": 1, "kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB}


def read_bytes(text: str) -> int:
    """A number of bytes with its unit.

    >>> read_bytes("12GiB"), read_bytes("1.5 MiB")
    (12884901888, 1572864)
    """
    found = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]+)", text.strip())
    try:
        if found is None:
            raise ValueError
        n_bytes = int(float(found[1]) * UNITS[found[2].lower()])
    except (KeyError, ValueError, OverflowError):
        n_bytes = 0
    if n_bytes < 1:
        raise InvalidValue(f"{shown_value(text)} is no size; use a number and B, KiB, MiB or GiB, as 12GiB.")
    return n_bytes
