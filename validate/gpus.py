"""The GPUs that cases run on, as PyTorch sees them: this machine's, or one that is not there.

PyTorch is asked in a process of its own: CUDA keeps some hundred MiB of a GPU for every process that asks it
anything, and a process forked from one that has asked cannot use it; so neither the sweep nor its fork server
asks. And the stand-in for a GPU is never loaded into the user's process.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Final, Literal

import torch

from memplan.errors import InvalidValue
from memplan.hardware import gpu, gpu_names
from validate.nogpu import environment_for

PATIENCE_S: Final = 120.0
"""How long a first look at the GPUs may take."""

PLAYED_GPUS: Final = 8
"""The number of GPUs that are played, one for each process: those of a usual node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """`n` GPUs, the first of which has this name, memory and compute capability; and what drives them.

    `known_as` is the name in memplan's table of a GPU with its compute capability and multiprocessors;
    `device` is "nogpu" for one that is not there.
    """

    n: int
    name: str
    memory_bytes: int
    capability: str
    multiprocessors: int
    driver: str | None
    cuda: str | None
    cudnn: int | None
    nccl: str | None
    known_as: str
    device: Literal["cuda", "nogpu"] = "cuda"


@cache
def gpus_here() -> Gpus | None:
    """The GPUs of this machine; None if it has none that PyTorch can use.

    Raises:
        InvalidValue: for a GPU that memplan's table does not know.
    """
    return _asked({}) if torch.cuda.is_available() else None


@cache
def gpus_played(name: str) -> Gpus:
    """GPUs of this name in memplan's table that are not there, as PyTorch sees them.

    Raises:
        MemplanError: for a name or a GPU that cannot be played, or if there is no CUDA build of PyTorch.
    """
    found = _asked(environment_for(gpu(name)))
    return replace(found, n=PLAYED_GPUS, known_as=name, device="nogpu", driver=None)


def _asked(environment: Mapping[str, str]) -> Gpus:
    asked = subprocess.run(
        [sys.executable, "-m", __name__],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env=os.environ | environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise InvalidValue(f"PyTorch could not look at the GPUs: {last}; use --device cpu.")
    return Gpus(**json.loads(asked.stdout.splitlines()[-1]))


def known_as(name: str, capability: tuple[int, int], multiprocessors: int, memory_bytes: int) -> str:
    """The name in memplan's table of a GPU that runs the same kernels; of several the nearest in memory.

    >>> known_as("NVIDIA H100 80GB HBM3", (9, 0), 132, 85_000_000_000)
    'h100-sxm'

    Raises:
        InvalidValue: if there is none.
    """
    alike = {
        entry.name: abs((entry.usable_bytes or 0) - memory_bytes)
        for entry in map(gpu, gpu_names())
        if entry.capability == capability and entry.multiprocessors == multiprocessors
    }
    if not alike:
        raise InvalidValue(
            f"{name} (compute capability {capability[0]}.{capability[1]}, {multiprocessors} "
            "multiprocessors) is none of `memplan gpus`; add it to memplan/hardware/gpus.toml, or use "
            "--device cpu."
        )
    return min(alike, key=lambda entry: alike[entry])


def _seen() -> Gpus:
    first = torch.cuda.get_device_properties(0)
    capability, n = (first.major, first.minor), first.multi_processor_count
    return Gpus(
        n=torch.cuda.device_count(),
        name=first.name,
        memory_bytes=first.total_memory,
        capability=f"{first.major}.{first.minor}",
        multiprocessors=n,
        driver=_driver(),
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(),
        nccl=_nccl(),
        known_as=known_as(first.name, capability, n, first.total_memory),
    )


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return None
    return said[0] if said else None


def _nccl() -> str | None:
    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


if __name__ == "__main__":
    print(json.dumps(asdict(_seen())))
