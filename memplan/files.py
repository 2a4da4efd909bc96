"""Tables of the package, and files from outside.

Only regular files of a sensible length are read; a pipe is never waited for.
"""

import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from memplan.errors import InvalidValue, MemplanError, reason


class Table(Mapping[str, dict[str, Any]]):
    """The entries of a TOML file by their names; each is parsed when it is asked for."""

    def __init__(self, text: str) -> None:
        _, *parts = re.split(r'^\["?([^"\]]+)"?\]$', text, flags=re.MULTILINE)
        self._texts = dict(zip(parts[::2], parts[1::2], strict=True))
        self._parsed: dict[str, dict[str, Any]] = {}

    def __getitem__(self, name: str) -> dict[str, Any]:
        if name not in self._parsed:
            self._parsed[name] = tomllib.loads(self._texts[name])
        return self._parsed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


@cache
def toml_table(name: str) -> Table:
    """The entries of one of the package's tables, read at first use; `name` is its path in the package."""
    with open(os.path.join(os.path.dirname(__file__), name), encoding="utf-8") as file:
        return Table(file.read())


def shown_path(path: str | os.PathLike[str], most: int = 120) -> str:
    """A path for an error's text, on one line whatever it holds."""
    text = os.fspath(path)
    text = text if isinstance(text, str) and text.isprintable() else repr(text)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def file_bytes(
    file: str | os.PathLike[str], *, most_bytes: int, what: str, smaller: str = "give another file"
) -> bytes:
    """The content of a file; `what` it should be and a `smaller` way out are for the errors' texts.

    Raises:
        InvalidValue: no such file, no regular file, one that cannot be read, or one that is larger.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise InvalidValue(f"no such file; give the path of a {what}.") from None
    except (OSError, ValueError) as error:
        raise InvalidValue(f"cannot be opened ({reason(error)}); give a readable {what}.") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InvalidValue(f"is not a regular file; give the path of a {what}.")
        data = _first_bytes(descriptor, most_bytes + 1)
    except OSError as error:
        raise InvalidValue(f"cannot be read ({reason(error)}); give a readable {what}.") from None
    finally:
        os.close(descriptor)
    if len(data) > most_bytes:
        raise InvalidValue(f"is larger than {most_bytes} bytes, which no {what} should be; {smaller}.")
    return data


def file_text(file: str | os.PathLike[str], *, most_bytes: int, what: str) -> str:
    """All of a file as UTF-8 text.

    Raises:
        InvalidValue: as `file_bytes`, or a file that is no such text.
    """
    return _text(file_bytes(file, most_bytes=most_bytes, what=what), what)


def xz_text(file: str | os.PathLike[str], *, most_bytes: int, what: str) -> str:
    """All of an xz file as UTF-8 text; neither the file nor the text may be larger than `most_bytes`.

    Raises:
        InvalidValue: as `file_text`, or a file that is not one whole xz stream.
    """
    import lzma  # rarely needed

    data = file_bytes(file, most_bytes=most_bytes, what=what)
    reader = lzma.LZMADecompressor(lzma.FORMAT_XZ)
    try:
        unpacked = reader.decompress(data, most_bytes + 1)
    except lzma.LZMAError as error:
        raise InvalidValue(f"is no xz file ({error}); compress the {what} again with xz.") from None
    if len(unpacked) > most_bytes:
        raise InvalidValue(f"unpacks to more than {most_bytes} bytes, which no {what} should have.")
    if not reader.eof or reader.unused_data:
        raise InvalidValue(f"is not one whole xz stream; compress the {what} again with xz.")
    return _text(unpacked, what)


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidValue(f"is not UTF-8 text (byte {error.start}); give a {what} as UTF-8.") from None


def json_value(text: str, *, what: str, way_out: str, **hooks: Any) -> Any:
    """The value of a JSON text, made with the `hooks` of `json.loads`; `what` it should be is for errors.

    Raises:
        InvalidValue: it is not JSON.
    """
    try:
        return json.loads(text, **hooks)
    except MemplanError:
        raise
    except RecursionError:
        raise InvalidValue(f"is nested too deeply for a {what}; {way_out}.") from None
    except json.JSONDecodeError as error:
        where = f"{error.msg}, line {error.lineno}"
        raise InvalidValue(
            f"is not JSON ({where}); it may be truncated: fetch it again, or {way_out}."
        ) from None
    except ValueError:
        raise InvalidValue(f"holds a number of thousands of digits; {way_out}.") from None


def of_file(file: str | os.PathLike[str], error: MemplanError) -> MemplanError:
    """The error with the file's path in its text."""
    return type(error)(f"{shown_path(file)}: {error}")


def _first_bytes(descriptor: int, most: int) -> bytes:
    parts, left = [], most
    while left and (part := os.read(descriptor, min(left, 2**20))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
