"""Notebooks run from top to bottom, and what they show is what the code says today."""

import re
from pathlib import Path
from tempfile import gettempdir

import nbformat
import pytest

from tests.notebooks import NOTEBOOKS, executed
from tests.standard import slowness

MOST_S = 60
"""Seconds of a standard machine's processor that a notebook may take."""

PLUMBING = "remove-cell"
"""The tag of a cell of imports and settings, which the documentation leaves out."""

WIDEST = 100
"""Characters of the longest line of code."""


def code_cells(notebook):
    """All cells of code but for the plumbing, which shows nothing."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [cell for cell in cells if PLUMBING not in cell.metadata.get("tags", ())]


def texts(cell):
    """What a cell prints and the text form of its results; pictures are left out."""
    printed = "".join(output.text for output in cell.outputs if output.output_type == "stream")
    shown = [output.data for output in cell.outputs if output.output_type == "execute_result"]
    return printed, [data["text/plain"] for data in shown if "image/png" not in data]


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.name)
def committed(request):
    return nbformat.read(request.param, as_version=4)


@pytest.fixture(scope="module")
def anew(committed):
    """The notebook executed, with a last cell that prints seconds of a standard machine's processor."""
    timed = nbformat.from_dict(committed)
    timed.cells.append(nbformat.v4.new_code_cell("import time; print(time.process_time())"))
    with slowness() as times:
        found = executed(timed)
    (printed,) = found.cells[-1].outputs
    printed.text = str(float(printed.text) / times[0])
    return found


def test_there_are_notebooks():
    assert NOTEBOOKS


def test_every_cell_runs_and_shows_something(anew):
    for cell in code_cells(anew):
        assert cell.outputs, f"shows nothing: {cell.source}"
        assert not [o for o in cell.outputs if o.output_type == "stream" and o.name == "stderr"], cell.source


def test_outputs_are_committed_and_say_what_the_code_says(committed, anew):
    for before, after in zip(code_cells(committed), code_cells(anew)[:-1], strict=True):
        assert before.outputs, f"committed without its output, use `make notebooks`: {before.source}"
        assert texts(before) == texts(after), f"out of date, use `make notebooks`: {before.source}"


def test_it_takes_less_than_a_minute_of_the_processor(anew):
    printed, _ = texts(anew.cells[-1])
    assert float(printed) < MOST_S


def test_every_picture_is_committed_once(committed):
    for cell in code_cells(committed):
        pictures = [o for o in cell.outputs if "image/png" in o.get("data", {})]
        assert len(pictures) <= 1, cell.source


def test_a_notebook_opens_with_a_question_and_ends_with_an_exercise_and_its_answer(committed):
    first, *_, exercise, computed, answer = committed.cells
    title, question = first.source.splitlines()[0], re.search(r"\*\*[^*]+\?\*\*", first.source)
    assert title.startswith("# ")
    assert title.endswith("?")
    assert question, "no question in bold"
    assert exercise.source.startswith("## Exercise\n")
    assert computed.metadata["tags"] == ["hide-cell"]
    assert answer.cell_type == "markdown"


def test_a_formula_stands_beside_the_pictures(committed):
    prose = "\n".join(cell.source for cell in committed.cells if cell.cell_type == "markdown")
    assert re.search(r"^\$\$ .+\$\$$", prose, re.MULTILINE), "no formula"


def test_code_is_narrow_and_its_plumbing_stands_apart(committed):
    plumbing, *others = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert plumbing.metadata["tags"] == [PLUMBING]
    for cell in others:
        assert not re.search(r"^(import|from|%)", cell.source, re.MULTILINE), cell.source
        assert max(map(len, cell.source.splitlines())) <= WIDEST, cell.source


def test_notebooks_define_nothing_and_name_no_machine(committed):
    text = re.sub(r'"image/png": "[^"]*"', "", nbformat.writes(committed))  # base64 may spell any short path
    for cell in code_cells(committed):
        lines = [line.split() for line in cell.source.splitlines()]
        assert not [words for words in lines if words and words[0] in ("def", "class", "async")], cell.source
        assert "lambda" not in cell.source, cell.source
    for machine in (str(Path.home()), str(Path(__file__).parents[1]), gettempdir()):
        assert machine not in text
