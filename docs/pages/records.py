"""What is on file, as it stands."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
"""The checkout."""


def records_of(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, as they stand."""
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "case" in row:
            yield row
