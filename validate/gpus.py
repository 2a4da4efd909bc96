"""The GPUs of this machine, as PyTorch sees them; asked in a process of its own.

CUDA keeps some hundred MiB of a GPU for every process that asks it anything, and a process forked from one
that has asked cannot use it; so neither the sweep nor its fork server asks.
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import cache
from typing import Final

import torch

PATIENCE_S: Final = 120.0
"""How long a first look at the GPUs may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """`n` GPUs, the first of which has this name, memory and compute capability; and what drives them."""

    n: int
    name: str
    memory_bytes: int
    capability: str
    driver: str | None
    cuda: str | None
    cudnn: int | None
    nccl: str | None


@cache
def gpus_here() -> Gpus | None:
    """The GPUs of this machine; None if it has none that PyTorch can use."""
    if not torch.cuda.is_available():
        return None
    asked = subprocess.run(
        [sys.executable, "-m", __name__], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    return Gpus(**json.loads(asked.stdout.splitlines()[-1]))


def _seen() -> Gpus:
    first = torch.cuda.get_device_properties(0)
    return Gpus(
        n=torch.cuda.device_count(),
        name=first.name,
        memory_bytes=first.total_memory,
        capability=f"{first.major}.{first.minor}",
        driver=_driver(),
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(),
        nccl=_nccl(),
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
