"""The environment of a run: versions, processor, GPUs, backend."""

import platform
import subprocess
from dataclasses import asdict
from functools import cache
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any, Final

import torch

from memplan.version import version
from validate import fake, nogpu
from validate.cases import Case
from validate.gpus import Gpus, gpus_here, gpus_played

ROOT: Final = Path(__file__).parents[1]


def environment(case: Case) -> dict[str, Any]:
    """The environment that a measurement may depend on, as plain values; it identifies no machine or person.

    `device` is "cpu", "nogpu", or the name of the GPU that it ran on, of which `gpu` says more.
    """
    around = surroundings(gpus_of(case)) | {"backend": case.backend}
    if case.plan.engine != "torch":
        around |= {case.plan.engine: package_version(case.plan.engine)}
    return around | {"tensors": fake.MEANING} if case.tensors == "fake" else around


def gpus_of(case: Case) -> Gpus | None:
    """The GPUs that a case runs on; None on CPU."""
    if case.device == "cpu":
        return None
    return gpus_here() if case.device == "cuda" else gpus_played(case.gpu)


def surroundings(gpus: Gpus | None) -> dict[str, Any]:
    """The part of `environment` that all cases on these GPUs, or on CPU, share."""
    if gpus is None:
        return _software() | {"device": "cpu"}
    if gpus.device == "nogpu":
        return _software() | {"device": "nogpu", "meaning": nogpu.MEANING, "gpu": asdict(gpus)}
    return _software() | {"device": gpus.name, "gpu": asdict(gpus)}


@cache
def _software() -> dict[str, Any]:
    return {
        "memplan": version(),
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "processor": _processor(),
    }


def _commit() -> str | None:
    """The checkout's commit, with a + if files differ from it; None where there is no checkout."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
