"""What a process is started with so that PyTorch finds the GPU that is not there."""

import os
import re
from typing import Final, Literal

import torch

from memplan.errors import InvalidValue
from memplan.hardware import Gpu
from validate.nogpu.build import NO_DEVICE, library, real_cudnn

MEANING: Final = (
    "PyTorch's CUDA software over a played CUDA runtime, no GPU: bytes are PyTorch's own, "
    "values and times mean nothing"
)
"""The kind of truth, as written in every record of such a run."""


RecordStream = Literal["early", "late"]
"""When a block that another stream has used (`Tensor.record_stream`) comes back to the allocator.

"early": at once when it is freed, as if the GPU had no work left. "late": once the host has waited for that
stream's work, as if the GPU did nothing until then. When a GPU has done it lies between the two; its reserved
bytes usually do, too. A program that only polls `Event.query` does not end, late.
"""


def environment_for(gpu: Gpu, record_stream: RecordStream = "early") -> dict[str, str]:
    """The variables that make a process find this GPU, with as much memory as PyTorch sees of a real one.

    Blocks under `record_stream` come back early or late.

    Raises:
        InvalidValue: for a GPU that is not NVIDIA's.
        NoGpuUnavailable: if the stand-in cannot be built here.
    """
    if gpu.capability is None or gpu.usable_bytes is None:
        raise InvalidValue(f"gpu={gpu.name!r} has no CUDA compute capability; use one of NVIDIA's GPUs.")
    played = library()
    major, minor = gpu.capability
    folders = [str(played.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {
        "LD_PRELOAD": str(played),
        "LD_LIBRARY_PATH": os.pathsep.join(folders),
        "MEMPLAN_NOGPU_CUDNN": str(real_cudnn()),
        "MEMPLAN_NOGPU_CUDNN_DRIVER": str(played.parent / NO_DEVICE),
        "TRITON_LIBCUDA_PATH": str(played.parent),
        "MEMPLAN_NOGPU_NAME": f"{gpu.title} (not there)",
        "MEMPLAN_NOGPU_CAPABILITY": str(10 * major + minor),
        "MEMPLAN_NOGPU_KERNELS": str(_kernels(10 * major + minor)),
        "MEMPLAN_NOGPU_MULTIPROCESSORS": str(gpu.multiprocessors),
        "MEMPLAN_NOGPU_THREADS": str(gpu.device.threads_per_multiprocessor),
        "MEMPLAN_NOGPU_BYTES": str(gpu.usable_bytes),
        "MEMPLAN_NOGPU_BYTES_PER_S": str(gpu.memory_bytes_per_s),
        "MEMPLAN_NOGPU_RECORD_STREAM": record_stream,
    }


def _kernels(capability: int) -> int:
    """For which compute capability (86 is 8.6) the kernels are built that a GPU of this one would run.

    A GPU runs those of the nearest earlier minor version, else what the driver compiles from an earlier major
    one. Of a GPU that is older than all of them the oldest are taken, as an earlier build would have its own.

    Source: CUDA C++ Programming Guide, "Binary Compatibility", "PTX Compatibility".
    """
    built = sorted(int(number) for number in re.findall(r"sm_(\d+)", torch._C._cuda_getArchFlags() or ""))
    earlier = [number for number in built if number <= capability]
    same_major = [number for number in earlier if number // 10 == capability // 10]
    return max(same_major or earlier or built[:1])
