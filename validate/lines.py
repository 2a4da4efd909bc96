"""Files of JSON lines that a command adds to: locked, each line on the disk whole or not at all."""

import fcntl
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from memplan.errors import InvalidValue, MemplanError
from memplan.files import shown_path
from validate.outputs import CannotWrite, check_folder


class DiskFull(MemplanError):
    """A line that could not be kept."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """An open file of lines; `content` is what it had, but for a last line that was cut off."""

    path: Path
    content: bytes
    descriptor: int

    def append(self, line: str) -> None:
        """Adds a line, to the disk: all of it or nothing.

        Raises:
            DiskFull: if it cannot be written; what the file had before it still has.
        """
        content = line.encode() + b"\n"
        end = os.fstat(self.descriptor).st_size
        try:
            written = os.write(self.descriptor, content)
            while written < len(content):
                written += os.write(self.descriptor, content[written:])
            os.fsync(self.descriptor)
        except OSError as error:
            os.ftruncate(self.descriptor, end)
            raise DiskFull(
                f"{shown_path(self.path)} cannot be written ({error.strerror}); what it has so far is safe: "
                "make room and continue with --resume."
            ) from None

    def cut_torn_line(self) -> None:
        """Removes the last line if it was cut off by a loss of power or a full disk."""
        if os.fstat(self.descriptor).st_size > len(self.content):
            os.ftruncate(self.descriptor, len(self.content))


@contextmanager
def open_lines(path: Path, *, resume: bool, starts: tuple[bytes, ...]) -> Iterator[Lines]:
    """A file of lines, locked to add to it, its folder made if need be.

    `starts`: how every line of such a file begins. Nothing is changed yet: when the caller has found its
    content to be what it should be, it removes what was cut off with `cut_torn_line`.

    Raises:
        InvalidValue: if it has lines and they are not to be resumed, or another process is adding to it.
        CannotWrite: if it is no regular file, or cannot be opened.
    """
    check_folder("--out", path.parent)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o644)
    except OSError as error:
        raise CannotWrite(
            f"--out {shown_path(path)} cannot be written ({error.strerror or error}); name another file."
        ) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CannotWrite(f"--out {shown_path(path)} is not a regular file; name another one.")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidValue(
                f"another sweep is adding to {shown_path(path)}; wait for it, or use another file for --out."
            ) from None
        if os.fstat(descriptor).st_size and not resume:
            raise InvalidValue(
                f"{shown_path(path)} exists; use --resume to run what it lacks, or another file for --out."
            )
        content = path.read_bytes()
        yield Lines(path=path, content=content[: _whole_bytes(content, starts)], descriptor=descriptor)
    finally:
        os.close(descriptor)


def _whole_bytes(content: bytes, starts: tuple[bytes, ...]) -> int:
    """The length of a file without a last line that was not written to its end."""
    end = content.rfind(b"\n") + 1
    if end < len(content):
        return end if _is_torn(content[end:], starts) else len(content)
    start = content.rfind(b"\n", 0, max(end - 1, 0)) + 1
    try:
        json.loads(content[start:end] or b"{}")
    except (ValueError, RecursionError):
        return start if _is_torn(content[start:end], starts) else end
    return end


def _is_torn(line: bytes, starts: tuple[bytes, ...]) -> bool:
    """Whether it is the beginning of a line of ours, or the zeros that a loss of power leaves."""
    begun = any(line.startswith(start) or start.startswith(line) for start in starts)
    return begun or not line.strip(b"\0\n")
