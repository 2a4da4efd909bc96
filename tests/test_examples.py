"""The examples run as they stand, and answer what they ask."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
SAYS = {
    "before_the_job": r"DOES NOT FIT(.|\n)*Fastest combination found that fits",
    "best_plan": r"Best of those that fit(.|\n)*torchrun --nnodes 2",
    "fits": r"^fits: a GPU holds [\d.]+ to [\d.]+ GiB(.|\n)*blocks\.\*\.copy as float32",
    "own_module": r"zero=0: fits, (.|\n)*zero=2: fits, (.|\n)*zero=3: fits, ",
    "which_gpu": r"(\n\S+ +dp=8 tp=1 zero=\d \w+ +[\d.]+ +[\d,]+){4}",
}
"""What an example's output has, as a regular expression."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_answers(name, tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLES[name]],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stderr == ""
    assert done.returncode == (1 if name == "before_the_job" else 0)
    assert re.search(SAYS[name], done.stdout), done.stdout


def test_there_are_five_examples_and_the_documentation_shows_each():
    assert set(EXAMPLES) == set(SAYS)
    page = (ROOT / "docs" / "howto" / "examples.md").read_text(encoding="utf-8")
    assert set(re.findall(r"examples/(\w+)\.py", page)) == set(EXAMPLES)
