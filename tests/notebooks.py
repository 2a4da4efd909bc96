"""Executes the notebooks in place: `python -m tests.notebooks`; with numbers (`03 05`), these only."""

import os
import sys
from pathlib import Path
from typing import Any, Final

import nbformat
from nbclient import NotebookClient

FOLDER: Final = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS: Final = sorted(FOLDER.glob("*.ipynb"))

MOST_CELL_S: Final = 300
"""Seconds after which a cell is given up, on a machine that may be busy with other work."""


def executed(notebook: Any) -> Any:
    """A notebook with the outputs that its cells have now, and without the times at which they ran."""
    anew = nbformat.from_dict(notebook)
    for cell in anew.cells:
        cell.metadata.pop("execution", None)
    client = NotebookClient(
        anew,
        timeout=MOST_CELL_S,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(FOLDER)}},
    )
    return client.execute(env={**os.environ, "PYTHONPATH": str(FOLDER.parent)})


if __name__ == "__main__":
    for path in NOTEBOOKS:
        if path.name.startswith(tuple(sys.argv[1:] or [""])):
            print(path.name, flush=True)
            nbformat.write(executed(nbformat.read(path, as_version=4)), path)
