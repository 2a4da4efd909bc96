"""Fresh processes, forked from a server that has imported the modules and used none of them.

`multiprocessing` has a fork server too, whose socket stays in the temporary folder when its client is killed.
This one talks over a socket without a name and hands out files without one. It lives in a session of its
own, so that Ctrl-C reaches its client only; it ends when its client does, however that ends, and whatever it
forked ends with it.
"""

import ctypes
import gc
import importlib
import os
import pickle
import selectors
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Any, Final, cast

from validate.tracebacks import without_folders

NUMBER_BYTES: Final = 32
"""The longest message: the number of a process.

With files it asks to fork that process, without files to kill it; the server returns it once it has forked.
"""

SAID_BYTES: Final = 4000
"""The number of bytes kept of a process's output."""

PR_SET_PDEATHSIG: Final = 1
"""Source: linux/prctl.h."""

FIRST_TO_GO: Final = "1000"
"""When the machine is out of memory the kernel ends these processes, not the one that keeps the records.

Source: man 5 proc_pid_oom_score_adj.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of a process: its function's result, or a signal or exit code; and its last output.

    All three are None if the server ended first.
    """

    value: Any = None
    signal: Signals | None = None
    exit_code: int | None = None
    said: str = ""


class Forked:
    """A process that a server was told to fork; ready to read (`fileno`) when it has ended."""

    def __init__(self, number: int, socket_: socket.socket, status: int, output: int, answer: int) -> None:
        self._number = number
        self._socket = socket_
        self._status = status
        self._output = output
        self._answer = answer

    def fileno(self) -> int:
        """The pipe that becomes readable when it exits."""
        return self._status

    def kill(self) -> None:
        """Ends it, if it has not ended; `end` says when it has."""
        try:
            self._socket.send(b"%d" % self._number)
        except OSError:
            return

    def end(self) -> End:
        """Waits for its end."""
        told = os.read(self._status, 16)
        said = without_folders(_content(self._output).decode(errors="replace"))[-SAID_BYTES:].strip()
        answer = _content(self._answer)
        for descriptor in (self._status, self._output, self._answer):
            os.close(descriptor)
        if not told:
            return End(said=said)
        code = os.waitstatus_to_exitcode(int(told))
        if code < 0:
            return End(signal=Signals(-code), said=said)
        return End(value=pickle.loads(answer) if answer else None, exit_code=code, said=said)


def ended(processes: Iterable[Forked], timeout_s: float) -> list[Forked]:
    """Waits until a process has ended or the time is out: the processes that have ended."""
    waiting: list[Any] = list(processes)
    return cast(list[Forked], wait(waiting, timeout_s))


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


SETTINGS: Final = {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Variables that libraries read: one thread; a silent profiler, so that a rank's last output is its own; and
checks for a GPU while modules are imported ask the driver, not CUDA, which does not survive a fork.
"""


class ForkServer:
    """The client's side: starts the server when it is first used, and again if it has ended.

    It imports the modules `preload` once for all processes, and has the variables `environment` besides ours.
    """

    def __init__(self, preload: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._preload = tuple(preload)
        self._environment = dict(environment or {})
        self._numbers = count()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._closed = False

    def close(self) -> None:
        """Ends the server and all that it forked, and waits until they have ended."""
        with self._lock:
            self._closed = True
            self._end()

    def fork(self, function: Callable[..., Any], *arguments: Any) -> Forked:
        """Runs a function in a fresh process; function and arguments must be importable and picklable.

        A server that dies before it has forked is replaced, once.

        Raises:
            BrokenPipeError: if the server is closed.
            ChildProcessError: if no server can be started, or the second one dies too.
        """
        number = next(self._numbers)
        status, told = os.pipe()
        work, output, answer = (os.memfd_create(name) for name in ("work", "output", "answer"))
        try:
            with open(work, "wb", closefd=False) as file:
                pickle.dump((function, arguments), file)
            with self._lock:
                socket_ = self._asked(number, told, work, output, answer)
        except BaseException:
            for descriptor in (status, output, answer):
                os.close(descriptor)
            raise
        finally:
            os.close(told)
            os.close(work)
        return Forked(number, socket_, status, output, answer)

    def _asked(self, number: int, *descriptors: int) -> socket.socket:
        """The socket of a server that has forked this process.

        A server that is dying may still take a message, so that only its answer says that it has forked.
        """
        for _ in range(2):
            if self._closed:
                raise BrokenPipeError("the fork server is closed")
            socket_ = self._socket or self._start()
            with suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(socket_, [b"%d" % number], descriptors)
                while said := socket_.recv(NUMBER_BYTES):
                    if int(said) == number:
                        return socket_
            self._end()
        raise ChildProcessError("two fork servers died before they had forked; what they printed says why")

    def _start(self) -> socket.socket:
        """Starts the server and waits until it has imported all."""
        self._socket, theirs = ours, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *self._preload],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=os.environ | SETTINGS | self._environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
        if not ours.recv(1):
            self._end()
            raise ChildProcessError("the fork server did not start; what it printed says why")
        return ours

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.wait()
            self._process = None


@dataclass(frozen=True, slots=True)
class _Running:
    pid: int
    told: int


def serve(client: socket.socket) -> None:
    """Runs the server until its client ends: forks and kills on request, reports processes that ended."""
    running: dict[int, _Running] = {}
    with selectors.DefaultSelector() as ready:
        ready.register(client, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is not client:
                    pidfd = key.fd
                    ready.unregister(pidfd)
                    os.close(pidfd)
                    _bury(running.pop(key.data))
                    continue
                message, descriptors, *_ = socket.recv_fds(client, NUMBER_BYTES, 4)
                if not message:
                    _end(running)
                    return
                number = int(message)
                if descriptors:
                    running[number] = _forked(client, *descriptors)
                    ready.register(os.pidfd_open(running[number].pid), selectors.EVENT_READ, number)
                    with suppress(BrokenPipeError):
                        client.send(message)
                elif number in running:
                    os.kill(running[number].pid, SIGKILL)


def _forked(client: socket.socket, told: int, work: int, output: int, answer: int) -> _Running:
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        client.close()
        os.close(told)
        _work(server, work, output, answer)
    for descriptor in (work, output, answer):
        os.close(descriptor)
    return _Running(pid, told)


def _work(server: int, work: int, output: int, answer: int) -> None:
    """The forked process: never returns."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
        if os.getppid() == server:
            os.dup2(output, 1)
            os.dup2(output, 2)
            with suppress(OSError):
                Path("/proc/self/oom_score_adj").write_text(FIRST_TO_GO)
            function, arguments = pickle.loads(_content(work))
            value = function(*arguments)
            with os.fdopen(answer, "wb") as file:
                pickle.dump(value, file)
            code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _bury(ended: _Running) -> None:
    _, status = os.waitpid(ended.pid, 0)
    try:
        os.write(ended.told, str(status).encode())
    except BrokenPipeError:
        pass
    finally:
        os.close(ended.told)


def _end(running: dict[int, _Running]) -> None:
    for process in running.values():
        os.kill(process.pid, SIGKILL)
    for process in running.values():
        _bury(process)


def _main(descriptor: str, *preload: str) -> None:
    for name in preload:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(descriptor)) as client:
        client.send(b".")
        serve(client)


if __name__ == "__main__":
    _main(*sys.argv[1:])
