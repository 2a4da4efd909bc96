"""`python -m memplan.web.pack`: writes `build/`, what the page is built from.

`memplan.zip` is the package as the browser imports it. `form.json` has the page's form and the answers to its
first question, so that both are there before Python is.
"""

import json
from pathlib import Path
from typing import Final
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import memplan
from memplan.version import version
from memplan.web import page

PACKAGE: Final = Path(memplan.__file__).parent
BUILD: Final = Path(__file__).parent / "build"

SUFFIXES: Final = (".py", ".toml", ".json")
LEFT_OUT: Final = ("cli", "plots", "web/node_modules", "web/build", "web/dist", "web/src", "widgets.py")
"""What no answer of the page needs."""

METADATA: Final = "Metadata-Version: 2.4\nName: memplan\nVersion: {}\n"


def packed(to: Path) -> None:
    """Writes the package, with the metadata that its version is read from; equal sources, equal bytes."""
    names = sorted(
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*")
        if path.suffix in SUFFIXES and path.is_file()
    )
    with ZipFile(to, "w", ZIP_DEFLATED, compresslevel=9) as file:
        for name in names:
            if not any(name == each or name.startswith(f"{each}/") for each in LEFT_OUT):
                _write(file, f"memplan/{name}", (PACKAGE / name).read_bytes())
        of = version()
        _write(file, f"memplan-{of}.dist-info/METADATA", METADATA.format(of).encode())


def _write(file: ZipFile, name: str, content: bytes) -> None:
    info = ZipInfo(name)
    info.compress_type = ZIP_DEFLATED
    file.writestr(info, content)


def first_paint() -> page.Answer:
    """The form, and the example with its answers."""
    example = dict(page.EXAMPLE)
    return {
        **page.form(),
        "stops": page.stops(example),
        "answer": page.answer(example),
        "held": page.held(example),
    }


def main() -> None:
    """Writes both files."""
    BUILD.mkdir(exist_ok=True)
    packed(BUILD / "memplan.zip")
    (BUILD / "form.json").write_text(json.dumps(first_paint()), encoding="utf-8")


if __name__ == "__main__":
    main()
