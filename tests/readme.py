"""The READMEs' commands and what they show of their output: `python -m tests.readme` writes it anew.

Of a block in which `...` stands for lines left out, the same parts of the output are shown.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from click.testing import CliRunner

from memplan.cli import commands
from validate.__main__ import main

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
MORE = ROOT / "memplan" / "README.md", ROOT / "validate" / "README.md"
"""What the README refers to for details."""
BLOCK = re.compile(r"```sh\n((?:memplan|python -m validate) [^`]*?)\n```\n\n```text\n(.*?)\n```", re.DOTALL)
LEFT_OUT = "..."


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Each command with what is shown of its output."""
    return ((match[1], match[2]) for match in BLOCK.finditer(text))


def output_of(command: str) -> str:
    """What a command of a README prints."""
    words = shlex.split(command.replace("\\\n", " ").partition("   #")[0])
    group, words = (commands, words[1:]) if words[0] == "memplan" else (main, words[3:])
    asked = [
        name for word in words for name in (sorted(map(str, ROOT.glob(word))) if "*" in word else [word])
    ]
    found = [str(ROOT / word) if word.startswith("data/") else word for word in asked]
    return CliRunner().invoke(group, found).output.rstrip("\n")


def missing(shown: str, output: str) -> list[str]:
    """The lines that are shown but are not in the output, in their order.

    >>> missing("a\\n...\\nc", "a\\nb\\nc"), missing("c\\na", "a\\nb\\nc")
    ([], ['a'])
    """
    left = iter(output.splitlines())
    return [line for line in shown.splitlines() if line not in ("", LEFT_OUT) and line not in left]


def refreshed(shown: str, output: str) -> str:
    """What is shown with today's figures: between `...`, the output from the first line shown to the last.

    >>> refreshed("a 1\\n...\\nc 3\\nx 2\\nd 4", "a 10\\nb 20\\nc 30\\ny 7\\nz 8\\nd 40")
    'a 10\\n...\\nc 30\\ny 7\\nz 8\\nd 40'
    """
    if LEFT_OUT not in shown.splitlines():
        return output
    left, parts = output.splitlines(), []
    for part in re.split(rf"^{re.escape(LEFT_OUT)}$\n?", shown, flags=re.MULTILINE):
        lines = part.strip("\n").splitlines()
        if lines:
            first = _place(left, lines[0], 0)
            last = first + _place(left[first:], lines[-1], len(lines) - 1)
            parts.append("\n".join(left[first : last + 1]))
            left = left[last + 1 :]
        else:
            parts.append("")
    return f"\n{LEFT_OUT}\n".join(parts).strip("\n")


def _place(lines: list[str], line: str, near: int) -> int:
    """The index nearest to `near` of a line that differs from `line` in its figures only."""
    found = [i for i, new in enumerate(lines) if _words(new) == _words(line)]
    if not found:
        raise ValueError(f"a line that is shown is not in the output: {line}")
    return min(found, key=lambda i: abs(i - near))


def _words(line: str) -> list[str]:
    """The words of a line, without its figures."""
    return re.sub(r"[-+]?[\d.][\d.,]*", "", line).split()


def rewritten(text: str) -> str:
    """A README with what its commands print today, all of it or the lines that it shows."""
    for command, shown in blocks(text):
        text = text.replace(f"```text\n{shown}\n```", f"```text\n{refreshed(shown, output_of(command))}\n```")
    return text


if __name__ == "__main__":
    for file in (README, *MORE):
        file.write_text(rewritten(file.read_text(encoding="utf-8")), encoding="utf-8")
