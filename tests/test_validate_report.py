"""The report: tables, merging, and the page as a browser shows it."""

import csv
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from itertools import chain

import numpy as np
import pytest
from click.testing import CliRunner

from memplan.engines.options import plan_of
from memplan.errors import MemplanError
from validate import report
from validate.__main__ import main
from validate.cases import Case
from validate.records import PEAK_TOLERANCE, Record, merged, open_records, read_records
from validate.report import charts, figures, page, tables
from validate.shipped import data_folder
from validate.suites.models import GPT, LLAMA

HOSTILE = "</script><script>document.title='run'</script><img src=x onerror=\"document.title='run'\">&amp;"


def rank(peak_bytes):
    known = {"weights_bytes": 1, "grads_bytes": 2, "optimizer_bytes": 3, "peak_bytes": peak_bytes}
    return known | {"collectives": []}


def ranks(peak_bytes, n):
    """The last one has the peak that is asked for, the others 1000 bytes."""
    return [rank(1000)] * (n - 1) + [rank(peak_bytes)]


def record(
    name, predicted_bytes=1000, measured_bytes=1000, *, model=LLAMA, steps=8, attributed=0.9999999, **plan
):
    case = Case(name=name, model=model, plan=plan_of(**{"precision": "fp32", **plan}), steps=steps)
    return Record(
        case=case.to_dict(),
        outcome="ok",
        predicted={"ranks": ranks(predicted_bytes, case.plan.world_size)},
        measured={
            "ranks": [
                known | {"rank": i, "pp": 0, "dp": 0, "tp": i}
                for i, known in enumerate(ranks(measured_bytes, case.plan.world_size))
            ],
            "losses": [2.0, 1.0],
        },
        peak_error=predicted_bytes / measured_bytes - 1,
        states_off_bytes=0,
        collectives_off=0,
        loss_error=1e-7,
        attributed_fraction=attributed,
    )


def failed(name, outcome, reason, **plan):
    return Record(
        case=Case(name=name, model=LLAMA, plan=plan_of(**plan)).to_dict(), outcome=outcome, reason=reason
    )


RECORDS = [
    record("exact", steps=9),
    record("near", 9_990, 10_000, tp=2, zero=0),
    record("far", 10_300, 10_000, tp=2, dp=2, zero=3, attributed=0.97),
    replace(record("off", model=GPT, dp=2), states_off_bytes=8),
    failed(
        "no",
        "refused",
        "rank 0: Traceback (most recent call last):\nRuntimeError: pytorch said no",
        dp=2,
        zero=1,
    ),
    failed("fell", "crashed", "Traceback\nValueError: it broke", dp=4),
    record(HOSTILE, 998, 1000, tp=2, micro_batch=2),
]


def keep(path, records):
    with open_records(path, resume=False) as opened:
        for known in records:
            opened.append(known)


@pytest.fixture
def file(tmp_path):
    found = tmp_path / "records.jsonl"
    keep(found, RECORDS)
    return found


def run(*arguments):
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def test_by_axis_counts_medians_worst_and_exact():
    rows = {(row["axis"], row["value"]): row for row in tables.rows_of(tables.by_axis(tables.frame(RECORDS)))}
    two = rows["tp", 2]
    assert (two["cases"], two["ran"], two["exact"]) == (3, 3, 3)
    assert two["median_peak_error"] == pytest.approx(0.002)
    assert two["worst_peak_error"] == pytest.approx(0.03)
    assert (rows["dp", 2]["cases"], rows["dp", 2]["ran"], rows["dp", 2]["exact"]) == (3, 2, 1)
    assert rows["dp", 4]["worst_peak_error"] is None
    assert ("precision", "fp32") in rows
    assert not any(axis == "optimizer" for axis, _ in rows)


def test_of_a_case_in_several_files_the_last_record_counts(file, tmp_path):
    again = tmp_path / "again.jsonl"
    keep(again, [replace(RECORDS[1], reason="second")])
    output = run(file, again, "--json").output
    assert [json.loads(line).get("reason") for line in output.splitlines()][1] == "second"
    assert len(output.splitlines()) == len(RECORDS)
    assert "1 older record" in run(file, again).output


def test_the_listing_fits_80_columns_and_names_what_did_not_run(file):
    output = run(file).output
    assert max(map(len, output.splitlines())) <= 80
    refused, crashed = output.index("refused: 1"), output.index("crashed: 1")
    assert "RuntimeError: pytorch said no" in output[refused:]
    assert "ValueError: it broke" in output[crashed:]
    assert "first line" not in output
    worst = output[output.index("the 5 worst peaks") :].splitlines()[1:]
    assert worst[0].startswith("far")
    assert output.index("by axis") < output.index("the 5 worst peaks")
    little = output[output.index("less than 99% of the bytes at the peak named") :].splitlines()[1]
    assert little.split() == ["far", "97.000%"]
    assert output.splitlines()[-1] == "bytes at the peak that are named tensors: at least 97.000%"


def test_where_filters_by_plan_and_by_outcome(file):
    assert "2 cases" in run(file, "--where", "outcome != 'ok'").output
    assert "1 case: " in run(file, "--where", "tp>1 and abs(peak_error)>0.01").output
    refused = run(file, "--where", "worldsize>1")
    assert refused.exit_code == 2
    assert "did you mean" in refused.output


def test_csv_has_one_row_per_case_and_units_in_its_names(file, tmp_path):
    run(file, "--csv", tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(newline="") as content:
        rows = list(csv.DictReader(content))
    assert [row["case"] for row in rows] == [known.case["name"] for known in RECORDS]
    assert rows[2]["predicted_peak_bytes"] == "10300"
    assert rows[2]["zero"] == "3"
    assert rows[4]["measured_peak_bytes"] == ""
    assert rows[4]["reason"] == "RuntimeError: pytorch said no"


def test_json_prints_each_case_once(file):
    printed = [json.loads(line) for line in run(file, file, "--json").output.splitlines()]
    assert printed == [json.loads(known.to_json()) for known in RECORDS]


def test_json_prints_what_a_file_has(file, tmp_path):
    some = {"python": "3.11", "torch": "2.13.0"}
    made = tmp_path / "made.jsonl"
    keep(made, [replace(RECORDS[0], environment=some), replace(RECORDS[1], environment=some), RECORDS[2]])
    assert run(made, "--json").output == made.read_text()
    assert run(file, "--json").output == file.read_text()


class _Page(HTMLParser):
    """What a browser's own dump says is there: the title, each case's cells, which are hidden."""

    def __init__(self, dump):
        super().__init__()
        self.title, self.shown, self.tags = "", "", []
        self.cases, self.cells, self._at = [], {}, None
        self.feed(dump)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        if "case" in (given.get("class") or "").split():
            self.cells = {}
            if "hidden" not in given:
                self.cases.append(self.cells)
        self._at = given.get("data-field", {"title": "title", "output": "shown"}.get(tag))

    def handle_endtag(self, tag):
        self._at = None

    def handle_data(self, data):
        if self._at in ("title", "shown"):
            setattr(self, self._at, getattr(self, self._at) or data)
        elif self._at:
            self.cells[self._at] = self.cells.get(self._at, "") + data.strip()

    @property
    def names(self):
        return [cells["case"] for cells in self.cases]


@pytest.fixture(scope="session")
def browser():
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("there is no Chromium; install it with `apt-get install chromium`")
    return found


@pytest.fixture
def opened(browser, file, tmp_path):
    """The page of the records, opened at an address and read back."""
    written = tmp_path / "report.html"
    assert run(file, "--html", written).exit_code == 0

    def read(address=""):
        options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}")
        done = subprocess.run(
            [browser, *options, "--dump-dom", f"{written.as_uri()}#{address}"],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        return _Page(done.stdout)

    return read


def test_the_page_shows_the_numbers_worst_first_and_runs_nothing_of_a_record(opened):
    seen = opened()
    assert seen.shown == "7 of 7"
    assert seen.names[0] == "fell"
    assert seen.names[1:4] == ["far", HOSTILE, "near"]
    assert seen.names[-1] == "no"
    far = seen.cases[1]
    assert (far["predicted_peak_bytes"], far["measured_peak_bytes"]) == ("10,300", "10,000")
    assert (far["peak_error"], far["world_size"]) == ("+3.00000%", "4")
    assert far["attributed_fraction"] == "97.000%"
    assert seen.cases[3]["attributed_fraction"] == "99.999%"
    assert seen.cases[-1]["reason"] == "RuntimeError: pytorch said no"
    assert seen.title.startswith("memplan")
    assert "img" not in seen.tags
    assert seen.tags.count("script") == 1


def test_the_address_sorts_filters_and_searches(opened):
    by_error = opened("sort=peak_error&tp=2")
    assert by_error.names == ["far", HOSTILE, "near"]
    assert by_error.shown == "3 of 7"
    assert opened("sort=-predicted_peak_bytes&outcome=ok").names[0] == HOSTILE
    assert opened("sort=case&name=FA").names == ["far"]
    assert opened("sort=%22%5D&tp=%3Cb%3E&zero=3").shown == "0 of 7"


OVERLAPS = """
const boxes = [...document.querySelectorAll("table")].map((table) => table.getBoundingClientRect());
const over = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
const pairs = boxes.flatMap((a, i) => boxes.slice(i + 1).filter((b) => over(a, b)));
const wide = boxes.filter((box) => box.right > window.innerWidth || box.left < 0);
document.title = `${boxes.length} tables, ${pairs.length} overlap, ${wide.length} are too wide`;
"""
"""Writes into the page's title how many of its tables are not as wide as they may be."""


@pytest.mark.parametrize("width", [1400, 1000])
def test_no_table_of_the_page_runs_into_another_or_out_of_the_window(browser, tmp_path, width):
    measured = data_folder() / "measurements"
    written = tmp_path / "report.html"
    files = [measured / f"{name}.jsonl" for name in ("matrix", "models", "gpu-standin")]
    text = page.html(merged(chain.from_iterable(map(read_records, files))), sources=[])
    text = re.sub(r"<meta http-equiv[^>]*>", "", text).replace(
        "</body>", f"<script>{OVERLAPS}</script></body>"
    )
    written.write_text(text)
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}")
    done = subprocess.run(
        [browser, *options, f"--window-size={width},2000", "--dump-dom", written.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    title = _Page(done.stdout).title
    assert title.endswith("tables, 0 overlap, 0 are too wide"), title


def test_the_page_needs_no_network_and_escapes_what_it_is_given():
    text = page.html(RECORDS, sources=[HOSTILE])
    assert HOSTILE not in text
    assert text.count("<script") == 1
    assert "default-src 'none'" in unescape(text)
    for address in ("http://", "https://"):
        places = [part[:40] for part in text.split(address)[1:]]
        assert all(part.startswith(("www.w3.org/", "purl.org/", "creativecommons.org/")) for part in places)
    assert not any(tag in text for tag in ("<img", "<link", "<iframe", "@import", "url(http"))


def test_the_page_of_nothing_and_of_refusals_alone():
    assert "0 of 0 cases confirmed" in page.html([], sources=[])
    assert "0 of 0 cases confirmed, 1 refused" in page.html([RECORDS[4]], sources=["a.jsonl"])


def test_summary_counts():
    assert report.summary(RECORDS).splitlines()[0].startswith("7 cases: 5 ran")
    assert sum(known.confirmed for known in RECORDS) == 3
    assert PEAK_TOLERANCE == 0.01


def test_figures_are_of_every_pair_and_nothing_is_cut_off():
    wide = {"small": [(2**20, 2**20), (2**20 + 8, 2**20)], "large": [(2**36, 2**35)]}
    near = {"one": [(70 * 2**30, 71 * 2**30), (60 * 2**30, 50 * 2**30)]}
    errors = {"exact": [0.0, 0.0], "some": [0.0, -1e-5, 0.5], "none": []}
    drawn = [figures.predicted_against_measured(groups) for groups in (wide, near)]
    assert "2 of 3 peaks predicted within 1%" in drawn[0].texts[0].get_text()
    assert [np.asarray(points.get_offsets()).shape[0] for points in drawn[0].axes[0].collections] == [2, 1]
    shown = figures.errors_by(errors)
    assert [text.get_text() for text in shown.axes[0].texts] == [
        "2 cases, all exact",
        "3 cases, 1 exact, worst 50 %",
    ]
    for figure in (*drawn, shown):
        figure.draw_without_rendering()
        (width_in, height_in), box = figure.get_size_inches(), figure.get_tightbbox()
        assert min(box.x0, box.y0) >= -0.01
        assert box.x1 <= width_in + 0.01
        assert box.y1 <= height_in + 0.01
    with pytest.raises(MemplanError, match="give at least one"):
        figures.errors_by({})


@pytest.mark.parametrize("peaks", [[6 * 2**20], [5 * 2**20, 9 * 2**20], [3 * 2**20, 900 * 2**30]])
def test_the_axes_of_the_pages_charts_are_in_words_that_people_read(peaks):
    records = [record(f"case {i}", n_bytes, n_bytes + 9) for i, n_bytes in enumerate(peaks)]
    for chart in (charts.predicted_against_measured(records), charts.error_histogram(records)):
        texts = re.findall(r"<t(?:ext|span)[^>]*>([^<]+)<", chart)
        assert not [text for text in texts if re.search(r"\u00d7|\\mathdefault|\d[eE][+-]", text)]
    ticks = re.findall(r">([\d.]+ [KMGT]iB)<", charts.predicted_against_measured(records))
    assert 4 <= len(ticks) <= 2 * figures.MOST_TICKS


def test_a_run_shows_both_columns_of_its_collectives():
    seen = {"kind": "all_gather", "axis": "dp", "calls": 9, "payload_bytes": 1234}
    ahead = [seen, {"kind": "send", "axis": "pp", "calls": 2, "payload_bytes": 50}]
    known = record("both")
    ranks = {"predicted": [rank(1) | {"collectives": ahead}], "measured": [rank(1) | {"collectives": [seen]}]}
    both = {side: (getattr(known, side) or {}) | {"ranks": own} for side, own in ranks.items()}
    both["measured"]["ranks"][0] |= {"rank": 0, "dp": 0}
    rows = [line.split() for line in report.details(replace(known, **both)).splitlines()]
    assert ["all_gather", "over", "dp,", "calls", "9", "9"] in rows
    assert ["all_gather", "over", "dp,", "payload_bytes", "1,234", "1,234"] in rows
    assert ["send", "over", "pp,", "payload_bytes", "-", "50"] in rows


def test_a_record_that_ran_and_has_no_ranks_is_put_on_the_page():
    case = Case(name="a case", model=LLAMA, plan=plan_of(dp=2, global_batch=2))
    record = Record(
        case=case.to_dict(), outcome="ok", peak_error=-0.004, states_off_bytes=0, collectives_off=0
    )
    assert "1 of 1 cases confirmed" in page.html([record], sources=["a"])


def test_the_names_of_a_suite_are_listed_without_what_moves_the_cursor(tmp_path):
    suite = tmp_path / "suite.toml"
    suite.write_text('[[case]]\nname = "a\\u001b[2Jb\\nc"\nmodel = "llama-small"\nseq_len = 32\n')
    listed = CliRunner().invoke(main, ["sweep", "--suite", str(suite), "--list"])
    assert listed.exit_code == 0, listed.output
    assert listed.output == "a\\x1b[2Jb\\nc\n"
