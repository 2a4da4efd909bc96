"""The READMEs show what their commands print; what they link to and the pictures in them are there."""

import re
from fnmatch import fnmatch

import pytest

from memplan.time.step import Measured
from tests.readme import MORE, README, ROOT, blocks, missing, output_of
from tests.replayed import EXPECTED
from validate.records import read_records

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


def test_the_readme_is_short_and_its_sentences_are_too():
    """150 lines, one command of one line with its answer, sentences of at most 35 words beside tables."""
    text = TEXTS[README]
    assert text.count("\n") <= 150
    command, shown = next(blocks(text))
    assert "\n" not in command
    assert len(shown.splitlines()) <= 20
    prose = re.sub(r"```.*?```|^\|.*?$|<img[^>]*>", "", text, flags=re.DOTALL | re.MULTILINE)
    sentences = re.split(r"[.:;!?]\s|\n\n|^- ", prose, flags=re.MULTILINE)
    assert max(len(sentence.split()) for sentence in sentences) <= 35


def test_the_readme_counts_what_is_on_file():
    """Its table of trust, against the records and the published rows."""
    text = TEXTS[README]
    n_ranks = sum(n for n, _, _ in EXPECTED.values())
    requested, _, reserved = (sum(equal[i] for _, equal, _ in EXPECTED.values()) for i in range(3))
    assert f"| {n_ranks:,} ranks | requested equal in {requested:,}, reserved in {reserved:,} |" in text
    published = output_of("python -m validate published")
    rows = re.search(r"(\d+) rows run as predicted: median error ([\d.]+)%, worst ([\d.]+)%", published)
    assert f"| {rows[1]} rows | median {rows[2]} % off, worst {rows[3]} % |" in text
    verdicts = re.findall(r"(\d+) verdicts, 0 contradicted", published)
    assert len(verdicts) == 2
    assert f"| {sum(map(int, verdicts))} verdicts | 0 contradicted |" in text
    low, high, n_runs = Measured().band
    assert f"| {n_runs} rows | " in text
    assert f"% off; 90 % had {low} to {high} times the estimate |" in text
    cases = [len(list(read_records(ROOT / f"data/measurements/{name}.jsonl"))) for name in ("quick", "wild")]
    assert f"| {cases[0]} and {cases[1]} cases |" in text


def test_every_picture_of_the_readme_is_there():
    pictures = re.findall(r'<img src="([^"]+)"', TEXTS[README])
    assert len(pictures) == 1
    for picture in pictures:
        assert (README.parent / picture).stat().st_size > 10_000


def test_the_table_of_runs_without_a_gpu_counts_what_their_replays_expect():
    """Ranks, and in how many of them requested, allocated and reserved bytes are equal."""
    count = r"\| ([\d,]+)[^|\n]*"
    rows = re.findall(rf"^\| `([\w*-]+)`[^|\n]*\|[^|\n]*{4 * count}", TEXTS[MORE[1]], re.MULTILINE)
    assert len(rows) == 24
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
