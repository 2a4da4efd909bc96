"""The READMEs show what their commands print; what they link to and the pictures in them are there."""

import re
from fnmatch import fnmatch

import pytest

from tests.readme import MORE, README, blocks, missing, output_of
from tests.test_replay_nogpu import EXPECTED

TEXTS = {file: file.read_text(encoding="utf-8") for file in (README, *MORE)}
REPORTS = [
    (command, shown)
    for text in TEXTS.values()
    for command, shown in blocks(text)
    if command.startswith("python -m validate report")
]


@pytest.mark.parametrize("command,shown", REPORTS, ids=[command for command, _ in REPORTS])
def test_reports_in_the_readmes_are_what_the_command_prints(command, shown):
    assert missing(shown, output_of(command)) == []


def test_every_picture_of_the_readme_is_there():
    pictures = re.findall(r'<img src="([^"]+)"', TEXTS[README])
    assert len(pictures) == 3
    for picture in pictures:
        assert (README.parent / picture).stat().st_size > 10_000


def test_the_table_of_runs_without_a_gpu_counts_what_their_replays_expect():
    """Ranks, and in how many of them requested, allocated and reserved bytes are equal."""
    count = r"\| ([\d,]+)[^|\n]*"
    rows = re.findall(rf"^\| `([\w*-]+)`[^|\n]*\|[^|\n]*{4 * count}", TEXTS[README], re.MULTILINE)
    assert len(rows) == 8
    for files, *shown in rows:
        found = [EXPECTED[name] for name in EXPECTED if fnmatch(name, files)]
        counts = [sum(n for n, _, _ in found), *(sum(equal[i] for _, equal, _ in found) for i in range(3))]
        assert [int(figure.replace(",", "")) for figure in shown] == counts, files


@pytest.mark.parametrize("file", TEXTS, ids=[str(file.relative_to(README.parent)) for file in TEXTS])
def test_links_lead_to_files_and_headings_that_are_there(file):
    links = re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", TEXTS[file])
    assert links
    for path, heading in links:
        target = (file.parent / path).resolve() if path else file
        assert target.exists(), path
        if heading:
            assert heading in anchors(target.read_text(encoding="utf-8")), (path, heading)


def anchors(text: str) -> set[str]:
    """What a page's headings are linked by: lower case, dashes for spaces, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
