"""With what a case ran: versions, processor, backend."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def environment(backend: str) -> dict[str, Any]:
    """What a measurement may depend on, as plain values; nothing that names a machine or a person."""
    return {
        "memplan": version("memplan"),
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "processor": _processor(),
        "device": torch.cuda.get_device_name() if backend == "nccl" else "cpu",
        "backend": backend,
    }


def _commit() -> str | None:
    """The checkout's commit, with a + if files differ from it; None where there is no checkout."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
