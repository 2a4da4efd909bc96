"""Traces of config.json files, each made once: they are kept in the user's cache folder.

A trace follows from the file's values, the device, memplan's own code, and the packages that are installed:
transformers' code asks which of them there are. So the name of an entry is a hash of all of these, and none
is ever out of date. Modules of one's own have no entries: nothing says when their code has changed.
"""

import gc
import hashlib
import json
import logging
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL, run
from tempfile import mkstemp
from time import monotonic
from typing import Any, Final, NamedTuple

from memplan.device import DeviceType
from memplan.errors import MemplanError, installed
from memplan.files import file_text
from memplan.mesh import Group, degrees_text
from memplan.models.config import Config
from memplan.models.recording import (
    FLOAT8,
    FLOAT8_ALL_GATHER,
    MIXTURE,
    SEQUENCE_PARALLEL,
    TORCHTITAN,
    Compiles,
)
from memplan.models.trace_from_json import LARGEST_TRACE_BYTES, model_of_text
from memplan.models.traced import TracedModel

MOST_BYTES: Final = 256 * 1024**2
"""The size of the folder, some 1,000 traces: beyond it the entries that were not used longest are removed."""

LOGGER: Final = logging.getLogger("memplan.tracing")
"""Told when a trace begins and when it ends; the command line shows it on a terminal."""

BESIDE: Final = f"""
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
asked = pickle.load(sys.stdin.buffer)
sys.modules["{__name__}"]._kept(asked)
"""
"""What another process runs: it reads where modules are, then a `Request`, and makes its entry."""

PACKAGES: Final = ("torch", "transformers", "peft", "torchao", "torchtitan", "deepspeed")
"""The packages whose code is traced."""


def traced_from_config(
    config: Config,
    name: str,
    device: DeviceType,
    precisions: Sequence[str] = (),
    *,
    cache: bool,
    mesh: Mapping[Group, int] | None = None,
    compiles: Compiles | None = None,
) -> TracedModel:
    """The model of a config.json, from the cache or traced anew: `memplan.tracing.huggingface`.

    Raises:
        MissingPackage: what the trace needs is not installed, or is broken.
        MemplanError: as `memplan.tracing.huggingface.traced_from_config`.
    """
    text = json.dumps(config.values, sort_keys=True)
    asked = Request(text, name, device, tuple(sorted({*precisions})), tuple((mesh or {}).items()), compiles)
    return _kept(asked) if cache else _traced(asked)


class Request(NamedTuple):
    """What a trace follows from: the text of a config.json, its name, and how it is traced."""

    text: str
    name: str
    device: DeviceType
    precisions: tuple[str, ...]
    mesh: tuple[tuple[Group, int], ...]
    compiles: Compiles | None = None


class NotKept(MemplanError):
    """Raised for a trace that is not in the cache, while `trace_at_once` asks which are not."""


def trace_at_once(ask: Iterable[Callable[[], object]]) -> None:
    """Make the traces that several calls ask for and the cache lacks, each in a process of its own.

    Errors of a trace are left to the call that needs it.
    """
    asked: dict[Request, None] = {}
    token = _MISSING.set(asked)
    try:
        for each in ask:
            with suppress(MemplanError):
                each()
    finally:
        _MISSING.reset(token)
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if min(len(asked), n_cores) < 2:
        return
    what = f"{next(iter(asked)).name} over {len(asked)} meshes"
    with told(what, next(iter(asked)).device), ThreadPoolExecutor(n_cores) as threads:
        list(threads.map(_trace_beside, asked))


def _trace_beside(asked: Request) -> None:
    """Make the entry of a trace in another process."""
    said = pickle.dumps(sys.path) + pickle.dumps(asked)
    run([sys.executable, "-c", BESIDE], input=said, stdout=DEVNULL, stderr=DEVNULL, check=False)


_MISSING: Final[ContextVar[dict[Request, None] | None]] = ContextVar("_MISSING", default=None)
"""Where traces that the cache lacks are noted instead of made, while `trace_at_once` asks for them."""


@lru_cache(maxsize=64)
def _kept(asked: Request) -> TracedModel:
    file = _entry(asked)
    found = None if file is None else _read(file)
    if found is None and (missing := _MISSING.get()) is not None:
        if file is not None:
            missing[asked] = None
        raise NotKept(f"{asked.name} is not traced yet.")
    if found is None:
        found = _traced(asked)
        if file is not None:
            _write(file, found)
    return found


def _traced(asked: Request) -> TracedModel:
    config, mesh = Config(json.loads(asked.text)), dict(asked.mesh)
    degrees = f" over {degrees_text(mesh)}" if mesh else ""
    compiled = " compiled" if asked.compiles else ""
    with told(f"{config.architecture or asked.name}{degrees}{compiled}", asked.device), no_collection():
        if sizes := config.value(TORCHTITAN, None):
            from memplan.tracing.factory import traced_from_sizes

            found = traced_from_sizes(
                sizes,
                asked.device,
                asked.precisions,
                asked.compiles,
                config.value(FLOAT8, "none"),
                mesh,
                gathers_float8=config.value(FLOAT8_ALL_GATHER, False),
                sequence_parallel=config.value(SEQUENCE_PARALLEL, False),
            )
            return replace(found, config=asked.text)
        if config.value(MIXTURE, False):
            from memplan.tracing.torchtitan_mixtures import traced_mixture

            found = traced_mixture(config, asked.name, asked.device, asked.precisions, mesh)
            return replace(found, config=asked.text)
        with installed(f"{asked.name}{degrees}" if mesh else "this architecture", "huggingface"):
            from memplan.tracing import huggingface
        found = huggingface.traced_from_config(
            config, asked.name, asked.device, asked.precisions, mesh, asked.compiles
        )
    return replace(found, config=asked.text)


@contextmanager
def told(what: str, device: DeviceType) -> Iterator[None]:
    """A block in which something is traced, told to `LOGGER`."""
    start = monotonic()
    LOGGER.info("tracing %s for %s", what, device.upper())
    try:
        yield
    finally:
        LOGGER.info("traced %s in %.0f s", what, monotonic() - start)


@contextmanager
def setting(get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> Iterator[None]:
    """A block in which a setting of the process has a value."""
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


@contextmanager
def without_remarks() -> Iterator[None]:
    """A block in which nobody is told what other packages' imports say.

    transformers warns of progress bars in notebooks, torchao of C++ extensions that nothing here calls,
    PyTorch of collectives that transformers and DeepSpeed call.
    """
    quiet = setting(lambda: logging.root.manager.disable, logging.disable, logging.WARNING)
    with warnings.catch_warnings(), quiet:
        warnings.filterwarnings("ignore", message="IProgress not found")
        warnings.filterwarnings("ignore", message=".* is deprecated", category=FutureWarning)
        yield


def without_logs_of_failures() -> AbstractContextManager[None]:
    """A block in which PyTorch logs no operation that fails on tensors without data: the error says it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    return setting(lambda: log.disabled, lambda off: setattr(log, "disabled", off), True)


def no_collection() -> AbstractContextManager[None]:
    """A block without garbage collection: storages are freed with their last reference, imports are fast."""
    return setting(gc.isenabled, lambda on: gc.enable() if on else gc.disable(), False)


def _entry(asked: Request) -> Path | None:
    """The file of an entry; None if there is no place for it, or code is traced that is no release."""
    found = {path: os.listdir(path) for path in dict.fromkeys(sys.path) if os.path.isdir(path)}
    releases = {one for names in found.values() for one in names if one.endswith(".dist-info")}
    try:
        import platformdirs  # slow to import, and rarely needed

        specs = {package: spec for package in PACKAGES if (spec := find_spec(package)) is not None}
    except (ImportError, ValueError):
        return None
    for package, spec in specs.items():
        where = "" if spec.origin is None else os.path.dirname(os.path.dirname(spec.origin))
        beside = [one for one in found.get(where, ()) if one.startswith(f"{package}-") and one in releases]
        if not beside:  # a checkout, whose code may change
            return None
    follows_from = *asked, sys.version, sorted(releases), _own_code()
    key = hashlib.sha256(json.dumps(follows_from).encode()).hexdigest()
    return Path(platformdirs.user_cache_dir("memplan")) / "traces" / key


def _own_code() -> str:
    """A hash of memplan's own modules."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(file: Path) -> TracedModel | None:
    """The trace in a file that `_write` wrote; None if there is none, or it is damaged."""
    try:
        text, _, said = file_text(file, most_bytes=LARGEST_TRACE_BYTES, what="trace").rpartition("\n")
        if hashlib.sha256(text.encode()).hexdigest() != said:
            return None
        found = model_of_text(text)
    except MemplanError:
        return None
    with suppress(OSError):
        os.utime(file)
    return found


def _write(file: Path, model: TracedModel) -> None:
    """Write a trace and its hash completely or, if the folder takes none, not at all."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, beside = mkstemp(dir=file.parent)
        try:
            os.close(descriptor)
            model.save(beside)
            text = Path(beside).read_text(encoding="utf-8").rstrip("\n")
            Path(beside).write_text(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}", encoding="utf-8")
            os.replace(beside, file)
        finally:
            Path(beside).unlink(missing_ok=True)
        _remove_oldest(file.parent)


def _remove_oldest(folder: Path) -> None:
    """Remove the files that were not used longest, until the others fit into `MOST_BYTES`."""
    used = sorted(((one.stat(), one) for one in folder.iterdir()), key=lambda pair: -pair[0].st_mtime_ns)
    total = 0
    for status, file in used:
        total += status.st_size
        if total > MOST_BYTES:
            file.unlink(missing_ok=True)
