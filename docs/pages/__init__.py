"""Pages that are generated: reference tables from the package's own, chapters of the READMEs, notebooks.

`write` puts them beside the pages written by hand, in the folders `reference`, `concepts` and `validation`.
"""

import lzma
import shutil
from pathlib import Path

from pages.readmes import chapters
from pages.records import ROOT
from pages.reference import REFERENCE
from pages.validation import on_file


def write(docs: Path) -> None:
    """Write every generated page; one that has not changed keeps its date, and Sphinx does not read it."""
    made = {
        **{f"reference/{name}": page() for name, page in REFERENCE.items()},
        "validation/on-file": on_file(),
        **chapters(),
    }
    for name, text in made.items():
        path = docs / f"{name}.md"
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    snapshot = (ROOT / "tests" / "snapshots" / "went-on.pickle.xz").read_bytes()
    (docs / "howto" / "files" / "snapshot.pickle").write_bytes(lzma.decompress(snapshot))
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        shutil.copy2(notebook, docs / "concepts" / notebook.name)
