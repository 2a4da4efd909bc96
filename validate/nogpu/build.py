"""The stand-in for the CUDA runtime, compiled at first use for the PyTorch that is installed.

What is played by hand is in `played/`. Every other function that NVIDIA's libraries export is compiled to one
that succeeds and does nothing, so that no call of PyTorch's ever reaches a real driver.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

import torch

from memplan.errors import MemplanError
from memplan.units import KiB

SOURCES: Final = Path(__file__).parent / "played"

LIBRARY: Final = "libmemplan_nogpu.so"

NO_DEVICE: Final = "libmemplan_no_device.so"
"""The driver that the real cuDNN finds, all of whose functions return `CUDA_ERROR_NO_DEVICE`."""

OPENED_BY_NAME: Final = ("libcuda.so.1", "libnvidia-ml.so.1")
"""What comes with the driver, which PyTorch and Triton open by name: links to ours."""

REPLACED: Final = ("libcudart.so*", "libcublas.so*", "libcublasLt.so*", "libcudnn.so*", "libnccl.so*")
"""NVIDIA's libraries, all of whose functions are replaced; ours call the real cuDNN to plan."""

EXPORTED: Final = re.compile(r"(?:__cuda|cuda|cublas|cudnn|p?nccl)[A-Z]\w*")
"""Names of these libraries' functions, without C++'s own."""

DRIVER_FUNCTION: Final = re.compile(r"\b(cu[A-Z]\w*)\s*\(")
"""A function's declaration in `cuda.h`."""

REPORTED: Final = "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"
"""The function of PyTorch's by which `played/blocks.cpp` sees the blocks that the allocator hands out."""

CUDA_ERROR_NO_DEVICE: Final = 100

FLAGS: Final = ("-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra")


class NoGpuUnavailable(MemplanError):
    """The stand-in cannot be built here."""


class Installed(NamedTuple):
    """Of the CUDA build of PyTorch: NVIDIA's libraries, the folders of their headers, its own allocator."""

    libraries: tuple[Path, ...]
    headers: tuple[Path, ...]
    allocator: Path


def can_be_built() -> bool:
    """Whether there is a CUDA build of PyTorch and a compiler."""
    return torch.version.cuda is not None and _compiler() is not None


@cache
def library() -> Path:
    """The stand-in's library, in a folder with the driver's names; compiled unless that was done before.

    Raises:
        NoGpuUnavailable: without a CUDA build of PyTorch, or without a C++ compiler.
    """
    if torch.version.cuda is None:
        raise NoGpuUnavailable(
            f"PyTorch {torch.__version__} is a CPU build, and the stand-in for a GPU needs a CUDA build; "
            "`make nogpu` sets one up beside .venv (about 5 GB), or use --device cpu."
        )
    compiler = _compiler()
    if compiler is None:
        raise NoGpuUnavailable(
            "the stand-in for a GPU is compiled at first use, and no C++ compiler was found; "
            "install g++ (with binutils), or use --device cpu."
        )
    import platformdirs

    installed = _installed()
    folder = Path(platformdirs.user_cache_dir("memplan")) / f"nogpu-{_digest(compiler, installed)}"
    if not folder.exists():
        _build(compiler, installed, folder)
    return folder / LIBRARY


def real_cudnn() -> Path:
    """The library of cuDNN that came with PyTorch.

    Raises:
        NoGpuUnavailable: without it.
    """
    found = next((path for path in _installed().libraries if path.name.startswith("libcudnn.so")), None)
    if found is None:
        raise NoGpuUnavailable("the CUDA build of PyTorch has no cuDNN in its wheels; use --device cpu.")
    return found


def _compiler() -> str | None:
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    return found if found and shutil.which("nm") else None


def _installed() -> Installed:
    """Source: the layout of the wheels `nvidia-*`, which lie beside `torch`."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise NoGpuUnavailable("PyTorch is not installed.")
    root = Path(spec.origin).parents[1] / "nvidia"
    libraries = tuple(sorted({path.resolve() for name in REPLACED for path in root.rglob(name)}))
    headers = {
        name: next(root.rglob(name), None)
        for name in ("cuda_runtime_api.h", "cuda.h", "cudnn_graph.h", "nccl.h")
    }
    lacking = [name for name, path in headers.items() if path is None]
    if lacking or not libraries:
        raise NoGpuUnavailable(
            f"the CUDA build of PyTorch {torch.__version__} has no {', '.join(lacking) or 'CUDA libraries'} "
            f"in its wheels ({root}); use a build of PyTorch that pip installed, or --device cpu."
        )
    folders = tuple(dict.fromkeys(path.parent for path in headers.values() if path))
    return Installed(libraries, folders, Path(spec.origin).parent / "lib" / "libc10_cuda.so")


def _digest(compiler: str, installed: Installed) -> str:
    """What the library depends on, in short."""
    known = hashlib.sha256(f"{torch.__version__} {compiler}".encode())
    for source in sorted(SOURCES.rglob("*.*")):
        known.update(source.read_bytes())
    known.update(Path(__file__).read_bytes())
    for path in installed.libraries:
        known.update(f"{path} {path.stat().st_size}".encode())
    return known.hexdigest()[:16]


def _build(compiler: str, installed: Installed, folder: Path) -> None:
    """Compiles in a folder that is renamed when all is done: a build that is cut off leaves nothing."""
    _check_reports(installed.allocator)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="build-") as made:
        scratch = Path(made)
        includes = [f"-I{path}" for path in (SOURCES / "headers", *installed.headers)]
        for source in SOURCES.glob("*.cpp"):
            _run(compiler, *FLAGS, *includes, "-c", str(source), "-o", str(scratch / f"{source.stem}.o"))
        ours = _functions([*scratch.glob("*.o")], "--extern-only")
        driver = _driver_functions(installed)
        rest = _returning(
            0, (_functions(installed.libraries, "--dynamic") | driver) - ours, scratch / "rest.cpp"
        )
        _run(compiler, *FLAGS, "-w", "-c", str(rest), "-o", str(scratch / "rest.o"))
        no_device = _returning(CUDA_ERROR_NO_DEVICE, driver, scratch / "no_device.cpp")
        whole = scratch / "whole"
        whole.mkdir()
        named = f"-Wl,-soname,{OPENED_BY_NAME[0]}"
        _run(compiler, *FLAGS, "-w", "-shared", named, str(no_device), "-o", str(whole / NO_DEVICE))
        objects = map(str, sorted(scratch.glob("*.o")))
        _run(compiler, "-shared", f"-Wl,-soname,{LIBRARY}", *objects, "-o", str(whole / LIBRARY), "-ldl")
        for name in OPENED_BY_NAME:
            (whole / name).symlink_to(LIBRARY)
        try:
            whole.rename(folder)
        except OSError:
            if not folder.exists():  # another process was faster
                raise


def _check_reports(allocator: Path) -> None:
    """Raises `NoGpuUnavailable` where the stand-in would not see the blocks that are handed out."""
    if REPORTED not in _run("nm", "--dynamic", "--undefined-only", str(allocator)):
        raise NoGpuUnavailable(
            f"PyTorch {torch.__version__} does not report the blocks that its allocator hands out in the way "
            "that the stand-in for a GPU knows, so new tensors would read what older ones left; use the "
            "release that `make nogpu` installs, or --device cpu."
        )


def _returning(status: int, functions: set[str], source: Path) -> Path:
    """The source of functions that do nothing and return this."""
    bodies = (f"int {name}() {{ return {status}; }}\n" for name in sorted(functions))
    source.write_text(f'extern "C" {{\n{"".join(bodies)}}}\n')
    return source


def _functions(files: tuple[Path, ...] | list[Path], which: str) -> set[str]:
    """The functions that object files or libraries define."""
    lines = _run("nm", which, "--defined-only", *map(str, files)).splitlines()
    words = [line.split() for line in lines if line.count(" ") >= 2]
    names = {name.partition("@")[0] for _, kind, name, *_ in words if kind in "TW"}
    return names if which == "--extern-only" else {name for name in names if EXPORTED.fullmatch(name)}


def _driver_functions(installed: Installed) -> set[str]:
    """The driver's functions, whose library comes with the driver: those that its header declares."""
    text = next(path / "cuda.h" for path in installed.headers if (path / "cuda.h").exists()).read_text()
    return {name for name in DRIVER_FUNCTION.findall(text) if not name.startswith("cuda")}


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoGpuUnavailable(
            f"the stand-in for a GPU could not be built: {command[0]} says\n{done.stderr[-2 * KiB :].strip()}"
        )
    return done.stdout
