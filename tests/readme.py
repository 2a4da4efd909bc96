"""The READMEs' commands and what they show of their output: `python -m tests.readme` writes it anew.

A block in which `...` stands for lines left out keeps its lines; it is only checked.
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
BLOCK = re.compile(r"```sh\n((?:memplan|python -m validate) .*?)\n```\n\n```text\n(.*?)\n```", re.DOTALL)
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
    """The lines that are shown, each with the figures that it has in the output.

    >>> refreshed("a 1\\n...\\nc 3", "a 10\\nb 20\\nc 30")
    'a 10\\n...\\nc 30'
    """
    if LEFT_OUT not in shown.splitlines():
        return output
    left, lines = output.splitlines(), []
    for line in shown.splitlines():
        at = next((i for i, new in enumerate(left) if _words(line) and _words(new) == _words(line)), None)
        lines.append(line if at is None else left[at])
        left = left if at is None else left[at + 1 :]
    return "\n".join(lines)


def _words(line: str) -> list[str]:
    """What is left of a line without its figures."""
    return re.sub(r"[-+]?[\d.][\d.,]*", "", line).split()


def rewritten(text: str) -> str:
    """A README with what its commands print today, all of it or the lines that it shows."""
    for command, shown in blocks(text):
        text = text.replace(f"```text\n{shown}\n```", f"```text\n{refreshed(shown, output_of(command))}\n```")
    return text


if __name__ == "__main__":
    for file in (README, *MORE):
        file.write_text(rewritten(file.read_text(encoding="utf-8")), encoding="utf-8")
