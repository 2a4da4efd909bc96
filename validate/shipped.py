"""The data that come with the project: the folder `data` of a checkout, or its copy in a wheel."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parent
DATA: Final = "data"


def data_folder() -> Path:
    """The folder of the data.

    >>> (data_folder() / "published" / "memory.csv").is_file()
    True
    """
    checkout = PACKAGE.parent / DATA
    return checkout if (PACKAGE.parent / "pyproject.toml").is_file() else PACKAGE / DATA


def found_files(paths: Iterable[Path]) -> Iterator[Path]:
    """The files that paths name; one that begins with `data` and is not here is looked for in `data_folder`.

    So `data/measurements/*.jsonl` names the same files wherever the command is run.

    >>> [path.name for path in found_files([Path("data/measurements/quick.jsonl")])]
    ['quick.jsonl']
    """
    for path in paths:
        shipped: list[Path] = []
        if not path.exists() and path.parts[:1] == (DATA,) and ".." not in path.parts:
            shipped = sorted(data_folder().glob("/".join(path.parts[1:])))
        yield from shipped or [path]
