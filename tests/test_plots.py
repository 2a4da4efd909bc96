"""Charts: what is drawn equals what was estimated; nothing is cut off, nothing warns."""

import dataclasses
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pandas
import pytest
from matplotlib.colors import to_rgb
from matplotlib.text import Text

import memplan
from memplan import plots
from memplan.errors import MemplanError
from memplan.memory import running_bytes
from memplan.plots.measured import _pair
from memplan.plots.style import HOLDS, VERDICTS
from memplan.plots.style import KINDS as PARTS
from memplan.plots.time import PASSES, SECONDS
from memplan.plots.timeline import _drawn, _held
from memplan.record import Stretch, chain, unrolled
from memplan.shapes import KINDS
from memplan.tables import finding, trust_text
from memplan.timetable import timetable
from memplan.units import GiB, MiB
from tests.gallery import EXAMPLES, gallery


@pytest.fixture(scope="module")
def one():
    return memplan.estimate("gpt2", cluster="1xh100-sxm")


@pytest.fixture(scope="module")
def staged():
    return memplan.estimate("llama-3-8b", cluster="8xh100-sxm", pp=4, zero=1, seq_len=2048)


def row(n, verdict, speed, high_gib, **plan):
    values: dict[str, Any] = {
        "pp": 1,
        "dp_replicate": 1,
        "dp": 8,
        "tp": 1,
        "zero": 3,
        "sequence_parallel": False,
    }
    values |= {"micro_batch": n, "recompute": "none", "recompute_blocks": None, "offload": False}
    held = {"device_low_bytes": 0.9 * high_gib * GiB, "device_high_bytes": high_gib * GiB}
    return values | held | {"verdict": verdict, "tokens_per_s_per_gpu": speed} | plan


FRONT = pandas.DataFrame(
    [
        row(4, "fits", 900.0, 70),
        row(2, "fits", 800.0, 60),
        row(3, "fits", 700.0, 65),
        row(1, "fits", 300.0, 30, recompute="full", recompute_blocks=8, dp_replicate=2),
        row(8, "cannot say", 950.0, 78),
        row(9, "does not fit", 960.0, 99),
        row(9, "does not fit", None, np.nan),
    ]
)
FRONT.attrs |= {"budget_bytes": 75 * GiB, "model": "gpt2", "cluster": "8xh100-sxm"}

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
        "schedule": plots.schedule(staged),
        "schedules on one axis": plots.schedule(staged, long),
        "schedule of many micro-batches": plots.schedule(long),
        "ring_all_reduce": plots.ring_all_reduce(4),
        "ring_all_reduce of many": plots.ring_all_reduce(16),
        "step_time": plots.step_time({"one GPU": one, "four stages of a pipeline": staged, "eight": long}),
        "front": plots.front(FRONT),
        "frontier": plots.frontier({"one GPU, no strategy": sweep[:1], "stages": [staged, long]}),
        "predicted_beside_measured": plots.predicted_beside_measured(
            [RECORD, {**RECORD, "outcome": "crashed"}]
        ),
    }


def image_size(file):
    return struct.unpack(">II", file.read_bytes()[16:24])


@pytest.mark.parametrize("lay_out", [lambda figure: figure, plots.slide], ids=["page", "slide"])
def test_nothing_of_any_chart_is_cut_off(one, staged, lay_out):
    for name, figure in every_chart(one, staged).items():
        lay_out(figure).draw_without_rendering()
        width_in, height_in = figure.get_size_inches()
        drawn = figure.get_tightbbox()
        assert drawn.x0 >= -0.01, name
        assert drawn.y0 >= -0.01, name
        assert drawn.x1 <= width_in + 0.01, name
        assert drawn.y1 <= height_in + 0.01, name


def test_the_gallery_has_every_chart_and_its_lines(tmp_path):
    assert set(EXAMPLES) == set(plots.__all__) - {"slide"}
    shown = {name: EXAMPLES[name] for name in ("ring_all_reduce", "predicted_beside_measured", "schedule")}
    page = gallery(tmp_path, shown).read_text(encoding="utf-8")
    for name in shown:
        assert f'<img src="{name}.png"' in page
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert image_size(tmp_path / f"{name}-slide.png") == (1920, 1080)
    assert "plots.ring_all_reduce(4)</pre>" in page.replace("\n<", "<")


def test_text_on_a_slide_is_read_from_the_back_row(one, staged):
    """12 points and more, and the title 20, on a slide 13.33 inches wide."""
    for name, figure in every_chart(one, staged).items():
        width_in, _ = plots.slide(figure).get_size_inches()
        sizes = [text.get_fontsize() * 13.33 / width_in for text in figure.findobj(Text) if text.get_text()]
        assert min(sizes) >= 12, name
        assert max(sizes) >= 20, name


def test_a_slide_may_say_something_else(one):
    assert plots.slide(plots.stage_peaks(one)).texts[0].get_text().startswith("gpt2 on 1xh100-sxm FITS")
    assert plots.slide(plots.stage_peaks(one), "It fits").texts[0].get_text() == "It fits"


def test_too_many_rows_for_a_slide_are_refused(one):
    many = plots.predicted_beside_measured([RECORD] * 40)
    with pytest.raises(MemplanError, match="40 rows have no room on a slide; use fewer"):
        plots.slide(many)


def test_every_axis_has_a_unit_or_a_name(one, staged):
    for name, figure in every_chart(one, staged).items():
        shared = figure.axes[:-1] if name == "schedules on one axis" else []
        assert all(axes.get_xlabel() for axes in figure.axes if axes not in shared), name
    assert "(GiB)" in plots.stage_peaks(staged).axes[0].get_xlabel()
    assert "(GiB)" in plots.step_timeline(one).axes[0].get_ylabel()


def test_bars_add_up_to_the_peak_in_the_order_of_the_legend(staged):
    figure = plots.stage_peaks(staged)
    labels = [part.label for part in PARTS.values()]
    found = {container.get_label(): container for container in figure.axes[0].containers}
    bars = {label: container for label, container in found.items() if label in labels}
    assert list(bars) == [part.label for part in PARTS.values()]
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown[: len(bars)] == list(bars)
    for i, stage in enumerate(staged.stages):
        widths = [container[i].get_width() for container in bars.values()]
        assert sum(widths) * GiB == pytest.approx(stage.peak.total_bytes, rel=1e-12)


def test_every_kind_has_a_color_a_label_and_a_place():
    assert set(PARTS) == set(KINDS)
    assert len({part.color for part in PARTS.values()}) == len(KINDS)


def luma(part):
    return np.dot(to_rgb(part.color), [0.299, 0.587, 0.114])


@pytest.mark.parametrize("parts", [PARTS, SECONDS], ids=["bytes", "seconds"])
def test_neighbours_in_a_stack_differ_in_grey(parts):
    assert min(abs(np.diff([luma(part) for part in parts.values()]))) > 0.15


def test_forward_is_told_from_backward_in_grey_by_its_numbers():
    for name, pair in PASSES.items():
        assert {part.ink for part in pair} == {"white" if name == "forward" else "black"}
        assert all((luma(part) < 0.55) == (name == "forward") for part in pair) or name == "backward-input"


def test_the_legend_leaves_out_what_is_not_seen(one):
    shown = [text.get_text() for text in plots.step_time({"one GPU": one}).legends[0].get_texts()]
    assert shown == ["compute", "update"]
    assert 0 < one.time.update_s < one.step_s


@pytest.mark.parametrize("stage", [None, 0, 3])
def test_the_timeline_by_kind_is_the_running_sum(staged, stage):
    of = staged.stage(stage)
    held = _held(of)
    expected = [n_bytes for _, n_bytes in running_bytes(staged.timeline(of.stage), of.rest_bytes)]
    assert held.total.tolist() == expected
    assert (held.by_kind >= 0).all()
    highest = held.by_kind[:, held.total.argmax()]
    assert sum(n for _, n in held.phases) == len(expected)
    assert highest.sum() == of.peak.total_bytes


def renamed(stretch):
    """The stretch with no names."""
    parts = tuple(map(renamed, stretch.parts))
    marks = (stretch.repeats, stretch.net_bytes, stretch.high_bytes, stretch.stage_pass)
    return Stretch("", stretch.events, parts, *marks)


@pytest.mark.parametrize("stage", [0, 3])
def test_phases_follow_from_the_record_and_not_from_names(staged, stage):
    of = staged.stage(stage)
    update = tuple(map(renamed, of.record.update))
    passes = of.record.step.parts[: -len(update)]
    step = chain("", *map(renamed, passes), *update)
    record = dataclasses.replace(of.record, step=step, update=update)
    unnamed = dataclasses.replace(of, record=record)
    assert _held(unnamed).phases == _held(of).phases
    assert {name for name, _ in _held(of).phases} == {"forward", "backward", "optimizer"}
    allocated = sum(event.buffer.kind == "temporaries" for _, event in unrolled(update[0]))
    assert _held(of).phases[-1] == ("optimizer", len(list(unrolled(update[0]))))
    assert allocated


def test_drawing_a_long_step_keeps_every_maximum(staged):
    of = staged.worst
    held = _held(of)
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


def test_the_ledger_shows_the_largest_tensors(one):
    assert len(plots.ledger_at_peak(one, top=3).axes[0].patches) == 3


def test_the_budget_is_drawn_only_where_all_have_it(one):
    free = memplan.estimate("gpt2")
    assert "budget" in plots.compare({"a": one}).legends[0].get_texts()[-1].get_text()
    assert "budget" not in plots.compare({"a": one, "b": free}).legends[0].get_texts()[-1].get_text()


def test_the_error_shown_is_of_the_rank_farthest_off():
    assert _pair(RECORD).error == pytest.approx(-0.005)
    assert "1 of 1" in plots.predicted_beside_measured([RECORD]).texts[0].get_text()
    assert "0 of 1" in plots.predicted_beside_measured([RECORD], tolerance=0.004).texts[0].get_text()


def test_the_front_is_of_plans_that_none_beats():
    figure = plots.front(FRONT)
    (line,) = [line for line in figure.axes[0].lines if line.get_label() == "none beats in both"]
    assert np.asarray(line.get_xdata()).tolist() == [30, 60, 70]
    assert np.asarray(line.get_ydata()).tolist() == [300, 800, 900]
    named = [text.get_text() for text in figure.legends[0].get_texts()][-3:]
    assert named == ["1  dp8 zero3 mb4", "2  dp8 zero3 mb2", "3  rep2 dp8 zero3 full of 8"]


@pytest.mark.parametrize("n", [2, 5])
def test_a_ring_leaves_every_chunk_summed_on_every_rank(n):
    axes = plots.ring_all_reduce(n).axes[0]
    chunks = [int(text.get_text().split()[-1]) for text in axes.texts]
    steps = 2 * (n - 1)
    held = [[{rank} for _ in range(n)] for rank in range(n)]
    for step in range(steps):
        sent = [(rank, chunks[rank * steps + step]) for rank in range(n)]
        moved = [((rank + 1) % n, chunk, set(held[rank][chunk])) for rank, chunk in sent]
        for rank, chunk, parts in moved:
            held[rank][chunk] |= parts
    assert all(parts == set(range(n)) for own in held for parts in own)


def test_a_bar_of_seconds_is_the_step(staged):
    (axes,) = plots.step_time({"a": staged}).axes
    widths = [container[0].get_width() for container in axes.containers]
    assert sum(widths) / 1000 == pytest.approx(staged.step_s, rel=1e-9)


def test_nothing_to_draw_is_refused_by_name(one):
    for draw in (
        lambda: plots.step_time({}),
        lambda: plots.step_time({"a": memplan.estimate("gpt2")}),
        lambda: plots.schedule(memplan.estimate("gpt2")),
        lambda: plots.front(FRONT[:0]),
        lambda: plots.frontier({}),
        lambda: plots.frontier({"a": [memplan.estimate("gpt2")]}),
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


def test_a_sweep_needs_two_values():
    one = memplan.estimate("gpt2", seq_len=64)
    with pytest.raises(memplan.InvalidValue, match="two values"):
        plots.sweep("micro_batch", [one])


def title_of(figure):
    return " ".join(figure.texts[0].get_text().split())


def test_titles_say_the_finding(one, staged):
    """The verdict with its bytes where one plan is drawn; which one is best where several are."""
    for draw in (plots.stage_peaks, plots.step_timeline):
        assert title_of(draw(one)) == finding(one) == "gpt2 on 1xh100-sxm FITS: 3.0-4.1 of 79.1 GiB"
    large = memplan.estimate("llama-3-8b", cluster="1xh100-sxm", seq_len=512)
    assert title_of(plots.compare({"a": large, "b": one})).startswith(
        "1 of 2 plans fits; b takes the least, "
    )
    assert title_of(plots.compare({"b": one, "a": staged})).startswith("All 2 plans fit; b takes the least, ")
    assert title_of(plots.step_time({"a": one, "b": staged})).startswith("a is the fastest: ")
    longer = [memplan.estimate("gpt2", cluster="1xh100-sxm", micro_batch=n) for n in (1, 2, 256)]
    assert [e.verdict for e in longer] == ["fits", "fits", "does not fit"]
    assert title_of(plots.sweep("micro_batch", longer)) == "gpt2 FITS up to micro_batch=2"
    assert title_of(plots.front(FRONT)) == "gpt2 on 8xh100-sxm FITS: the fastest holds 63.0-70.0 GiB"


def test_a_bar_shows_the_interval_that_its_verdict_hangs_on(staged):
    (axes,) = plots.stage_peaks(staged).axes
    boxes: list[Any] = list(axes.patches)
    drawn = [box for box in boxes if box.get_height() == pytest.approx(0.4)]
    for box, stage in zip(drawn, staged.stages, strict=True):
        held = staged.device_bytes_of(stage)
        assert box.get_x() * GiB == pytest.approx(held.low_bytes)
        assert (box.get_x() + box.get_width()) * GiB == pytest.approx(held.high_bytes)
        mark = VERDICTS[staged.verdict if stage is staged.worst else None]
        assert to_rgb(box.get_edgecolor()[:3]) == to_rgb(mark.color)
    assert staged.device_bytes_of(staged.worst) == staged.device_bytes


def test_lines_are_the_budget_and_the_usable_bytes(one, staged):
    gpu = staged.cluster.gpu
    for draw in (plots.stage_peaks, plots.step_timeline):
        (axes,) = draw(staged).axes
        ends = [np.asarray(line.get_xydata()).ravel().tolist() for line in axes.lines]
        for n_bytes in (staged.cluster.budget_bytes, gpu.usable_bytes):
            assert any(end.count(n_bytes / GiB) == 2 for end in ends)


def test_the_timeline_and_the_sweep_show_what_a_gpu_holds(staged):
    sweep = plots.sweep(
        "seq_len", [memplan.estimate("gpt2", cluster="1xh100-sxm", seq_len=n) for n in (8, 9)]
    )
    for figure in (plots.step_timeline(staged), sweep):
        assert HOLDS in [text.get_text() for text in figure.legends[0].get_texts()]


def test_every_verdict_is_drawn_in_one_way():
    assert set(VERDICTS) == {*memplan.hardware.VERDICTS, None}
    assert len({mark.color for mark in VERDICTS.values()}) == len(VERDICTS)
    (axes,) = plots.front(FRONT).axes
    drawn = {points.get_label(): points for points in axes.collections}
    for verdict in ("fits", "cannot say", "does not fit"):
        points: Any = drawn[verdict]
        assert tuple(points.get_facecolor()[0][:3]) == to_rgb(VERDICTS[verdict].color)


@pytest.mark.parametrize("cluster", ["1xh100-sxm", "1xrtx-4090", "1xmi300x", "cpu"])
def test_charts_say_what_confirmed_the_bytes_of_this_gpu(cluster):
    e = memplan.estimate("gpt2", cluster=cluster, seq_len=64)
    assert trust_text(e) in plots.stage_peaks(e).get_suptitle()
    found = FRONT.copy()
    found.attrs["trust"] = trust_text(e)
    assert trust_text(e) in plots.front(found).get_suptitle()


def test_pipelines_of_one_job_share_an_axis(staged):
    more = memplan.estimate("llama-3-8b", cluster="8xh100-sxm", pp=4, seq_len=2048, global_batch=16)
    figure = plots.schedule(staged, more)
    first, second = figure.axes
    assert first.get_xlim() == second.get_xlim()
    ends = [max(each.stop_s for each in timetable(e)) for e in (staged, more)]
    assert ends[0] != ends[1]
    boxes: list[list[Any]] = [list(axes.patches) for axes in figure.axes]
    drawn = [max(box.get_x() + box.get_width() for box in each) for each in boxes]
    assert drawn[0] / drawn[1] == pytest.approx(ends[0] / ends[1])
