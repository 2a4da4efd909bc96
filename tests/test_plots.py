"""Charts: what is drawn equals what was estimated; nothing is cut off, nothing warns."""

import subprocess
import sys

import numpy as np
import pytest

import memplan
from memplan import plots
from memplan.errors import MemplanError
from memplan.memory import running_bytes
from memplan.plots.measured import _pair
from memplan.plots.memory import _ledger
from memplan.plots.style import COLORS, LABELS, STACK, stage_of
from memplan.plots.timeline import _drawn, _held
from memplan.shapes import KINDS
from memplan.units import GiB, MiB


@pytest.fixture(scope="module")
def one():
    return memplan.estimate("gpt2", cluster="1xh100-sxm")


@pytest.fixture(scope="module")
def staged():
    return memplan.estimate("llama-3-8b", cluster="8xh100-sxm", pp=4, zero=1, seq_len=2048)


RECORD = {
    "case": {"name": "dp2"},
    "outcome": "ok",
    "predicted": {"ranks": [{"peak_bytes": 100 * MiB}, {"peak_bytes": 199 * MiB}]},
    "measured": {"ranks": [{"peak_bytes": 100 * MiB}, {"peak_bytes": 200 * MiB}]},
}


def every_chart(one, staged):
    sweep = [memplan.estimate("gpt2", cluster="1xh100-sxm", micro_batch=n) for n in (1, 2, 4)]
    long = memplan.estimate("llama-3-8b", cluster="8xh100-sxm", pp=8, global_batch=64, seq_len=2048)
    return {
        "stage_peaks": plots.stage_peaks(staged),
        "compare": plots.compare({"one GPU": one, "a much longer name, on\ntwo lines": staged}),
        "step_timeline": plots.step_timeline(one),
        "step_timeline of a long step": plots.step_timeline(long),
        "compare beside long names": plots.compare(
            {
                "8 sequences of a batch in 8 passes": long,
                "a plan whose name says " + 9 * "very " + "much": long,
            }
        ),
        "ledger_at_peak": plots.ledger_at_peak(staged),
        "sweep": plots.sweep("micro_batch", sweep),
        "predicted_beside_measured": plots.predicted_beside_measured(
            [RECORD, {**RECORD, "outcome": "crashed"}]
        ),
    }


def test_nothing_of_any_chart_is_cut_off(one, staged):
    for name, figure in every_chart(one, staged).items():
        figure.draw_without_rendering()
        width_in, height_in = figure.get_size_inches()
        drawn = figure.get_tightbbox()
        assert drawn.x0 >= -0.01, name
        assert drawn.y0 >= -0.01, name
        assert drawn.x1 <= width_in + 0.01, name
        assert drawn.y1 <= height_in + 0.01, name


def test_every_axis_has_a_unit_or_a_name(one, staged):
    for name, figure in every_chart(one, staged).items():
        assert all(axes.get_xlabel() for axes in figure.axes), name
    assert "(GiB)" in plots.stage_peaks(staged).axes[0].get_xlabel()
    assert "(GiB)" in plots.step_timeline(one).axes[0].get_ylabel()


def test_bars_add_up_to_the_peak_in_the_order_of_the_legend(staged):
    figure = plots.stage_peaks(staged)
    bars = {container.get_label(): container for container in figure.axes[0].containers}
    assert list(bars) == [LABELS[kind] for kind in STACK]
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown[: len(bars)] == list(bars)
    for i, stage in enumerate(staged.stages):
        widths = [container[i].get_width() for container in bars.values()]
        assert sum(widths) * GiB == pytest.approx(stage.peak.total_bytes, rel=1e-12)


def test_every_kind_has_a_color_a_label_and_a_place():
    assert set(STACK) == set(LABELS) == set(COLORS) == set(KINDS)
    assert len(set(COLORS.values())) == len(KINDS)


def test_neighbours_in_a_stack_differ_in_grey():
    luma = [
        np.dot([int(COLORS[kind][i : i + 2], 16) / 255 for i in (1, 3, 5)], [0.299, 0.587, 0.114])
        for kind in STACK
    ]
    assert min(abs(np.diff(luma))) > 0.15


@pytest.mark.parametrize("stage", [None, 0, 3])
def test_the_timeline_by_kind_is_the_running_sum(staged, stage):
    of = stage_of(staged, stage)
    held = _held(staged.timeline(of.stage), of.peak)
    expected = [n_bytes for _, n_bytes in running_bytes(staged.timeline(of.stage), of.rest_bytes)]
    assert held.total.tolist() == expected
    assert (held.by_kind >= 0).all()
    highest = held.by_kind[:, held.total.argmax()]
    assert sum(n for _, n in held.phases) == len(expected)
    assert highest.sum() == of.peak.total_bytes


def test_drawing_a_long_step_keeps_every_maximum(staged):
    of = staged.worst
    held = _held(staged.timeline(), of.peak)
    starts, points = _drawn(held)
    assert len(starts) == len(points) + 1
    assert (np.diff(starts) > 0).all()
    assert len(points) < len(held.total)
    assert held.total[points].max() == of.peak.total_bytes
    first = 0
    for _, n in held.phases:
        inside = points[(points >= first) & (points < first + n)]
        assert held.total[inside].max() == held.total[first : first + n].max()
        first += n


def test_the_ledger_is_the_peak(one):
    rows = _ledger(one, one.worst)
    assert sum(row.total_bytes for row in rows) == one.peak.total_bytes
    assert len(plots.ledger_at_peak(one, top=3).axes[0].patches) == 3


def test_the_budget_is_drawn_only_where_all_have_it(one):
    free = memplan.estimate("gpt2")
    assert "budget" in plots.compare({"a": one}).legends[0].get_texts()[-1].get_text()
    assert "budget" not in plots.compare({"a": one, "b": free}).legends[0].get_texts()[-1].get_text()


def test_the_error_shown_is_of_the_rank_farthest_off():
    assert _pair(RECORD).error == pytest.approx(-0.005)
    assert "1 of 1" in plots.predicted_beside_measured([RECORD]).get_suptitle()
    assert "0 of 1" in plots.predicted_beside_measured([RECORD], tolerance=0.004).get_suptitle()


def test_nothing_to_draw_is_refused_by_name(one):
    for draw in (
        lambda: plots.compare({}),
        lambda: plots.sweep("seq_len", []),
        lambda: plots.sweep("precision", [one]),
        lambda: plots.predicted_beside_measured([{**RECORD, "outcome": "crashed"}]),
        lambda: plots.step_timeline(one, stage=7),
        lambda: plots.ledger_at_peak(one, top=0),
    ):
        with pytest.raises(MemplanError, match=r"give at least one|use "):
            draw()


def test_charts_need_no_screen_and_no_pyplot(one):
    code = (
        "import sys, memplan; memplan.estimate('gpt2').plot().savefig(sys.stderr.buffer); "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.DEVNULL, timeout=60)


def test_a_textbook_chart_has_no_verdict_and_no_budget():
    textbook = memplan.estimate("gpt3-175b", cluster="1xh100-sxm", engine="textbook")
    texts = [text.get_text() for text in plots.stage_peaks(textbook).axes[0].texts]
    assert not any("fit" in text for text in texts)
    assert not any("budget" in text.get_text() for text in plots.stage_peaks(textbook).legends[0].get_texts())


@pytest.mark.parametrize("seq_len", [4096, 8192, 9216])
def test_a_chart_says_the_estimates_verdict_and_no_line_goes_through_it(seq_len):
    e = memplan.estimate("llama-3-8b", cluster="8xh100-sxm", zero=3, seq_len=seq_len)
    figure = plots.stage_peaks(e)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    total = next(text for text in axes.texts if e.verdict in text.get_text())
    (line,) = [line for line in axes.lines if "budget" in str(line.get_label())]
    box = total.get_window_extent().transformed(axes.transData.inverted())
    assert not box.x0 < float(np.asarray(line.get_xdata())[0]) < box.x1


def test_counts_have_no_ticks_between_them():
    figure = plots.sweep("micro_batch", [memplan.estimate("gpt2", micro_batch=n) for n in (1, 2, 3)])
    figure.draw_without_rendering()
    assert all(tick == int(tick) for tick in figure.axes[0].get_xticks())
