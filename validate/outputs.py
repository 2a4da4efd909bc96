"""Output files of commands: written completely or not at all, and never over inputs or others' files.

A file is checked before the work begins, so that no work is lost for a folder that cannot be written. Its
content goes to a file beside it, which replaces it when it is complete.
"""

import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from memplan.errors import MemplanError
from memplan.files import shown_path

HEAD_BYTES: Final = 4096
"""How much of an existing file is read to tell who wrote it."""

Ours = Callable[[bytes], bool]
"""Tells from a file's beginning whether the same command wrote it."""


class CannotWrite(MemplanError):
    """A file that a command cannot write, or must not."""


def begins_with(*starts: bytes) -> Ours:
    """Files that begin with one of some texts, and empty ones."""
    return lambda head: not head or head.startswith(starts)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """A file to be written as a whole; use `output_files`."""

    flag: str
    path: Path

    def write(self, content: str | bytes) -> None:
        """Puts the file there, or leaves what was there as it was.

        Raises:
            CannotWrite: if it cannot be written.
        """
        data = content.encode("utf-8") if isinstance(content, str) else content
        try:
            descriptor, beside = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
                Path(beside).chmod(_usual_mode(self.path))
                Path(beside).replace(self.path)
            except BaseException:
                with suppress(OSError):
                    Path(beside).unlink()
                raise
        except OSError as error:
            raise _cannot(self.flag, self.path, error) from None


def output_files(
    outputs: Mapping[str, tuple[Path | None, Ours]], *, inputs: Iterable[Path] = ()
) -> dict[str, OutputFile]:
    """The files that are asked for, by flag: each can be written now, and may be.

    `outputs`: of each flag its file, None if it was not given, and what of an existing file shows that the
    command wrote it.

    Raises:
        CannotWrite: a file that is an input or another output, that is of something else, or that cannot be
            written.
    """
    known = {"a file that is read": [*inputs]}
    found = {}
    for flag, (path, ours) in outputs.items():
        if path is None:
            continue
        path = Path(os.path.realpath(path))
        for what, others in known.items():
            if any(_same(path, other) for other in others):
                raise CannotWrite(f"{flag} {shown_path(path)} is also {what}; name another file.")
        _check_may_be_replaced(flag, path, ours)
        check_folder(flag, path.parent)
        known[f"the file of {flag}"] = [path]
        found[flag] = OutputFile(flag=flag, path=path)
    return found


def _check_may_be_replaced(flag: str, path: Path, ours: Ours) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise _cannot(flag, path, error) from None
    if not stat.S_ISREG(mode):
        raise CannotWrite(f"{flag} {shown_path(path)} is not a regular file; name another one.")
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise _cannot(flag, path, error) from None
    if not ours(head):
        raise CannotWrite(
            f"{flag} {shown_path(path)} exists, and this command did not write it; name another file, or "
            "remove this one."
        )
    if not os.access(path, os.W_OK):
        raise CannotWrite(
            f"{flag} {shown_path(path)} is not to be written (its permissions); name another file."
        )


def check_folder(flag: str, folder: Path) -> None:
    """Make a folder if it is not there, and raise unless files can be made in it.

    Raises:
        CannotWrite: with the system's reason.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, probe = tempfile.mkstemp(prefix=".memplan.", dir=folder)
        os.close(descriptor)
        Path(probe).unlink()
    except OSError as error:
        raise _cannot(flag, folder, error) from None


def check_new_folder(flag: str, folder: Path) -> None:
    """As `check_folder`, for one that is to hold nothing else.

    Raises:
        CannotWrite: also if it is there and not empty.
    """
    check_folder(flag, folder)
    if any(folder.iterdir()):
        raise CannotWrite(f"{flag} {shown_path(folder)} is not empty; name a new folder.")


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return one == Path(os.path.realpath(other))


def _usual_mode(path: Path) -> int:
    """The permissions of what is replaced, or of a new file."""
    with suppress(OSError):
        return stat.S_IMODE(path.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _cannot(flag: str, path: Path, error: OSError) -> CannotWrite:
    return CannotWrite(
        f"{flag} {shown_path(path)} cannot be written ({error.strerror or error}); name another file."
    )
