"""Menus for a plan: what a choice shows, by a stand-in for ipywidgets, which tests do without."""

import sys
from types import SimpleNamespace

import pytest

from memplan.errors import MemplanError
from memplan.widgets import planner


@pytest.fixture
def menus(monkeypatch):
    """A stand-in that shows the first choice of each menu, then whatever is asked for."""
    shown = SimpleNamespace(show=None, menus={})

    def interactive_output(show, named):
        shown.show, shown.menus = show, named
        show(**{name: menu.options[0] for name, menu in named.items()})
        return "output"

    fake = SimpleNamespace(
        Dropdown=lambda options, description: SimpleNamespace(options=options, description=description),
        HBox=list,
        VBox=list,
        interactive_output=interactive_output,
    )
    monkeypatch.setitem(sys.modules, "ipywidgets", fake)
    return shown


def test_a_choice_shows_its_verdict_its_charts_and_its_command(menus, capsys):
    box = planner("llama-3-8b", cluster="8xh100-sxm", global_batch=8, seq_len=2048)
    assert box[-1] == "output"
    said = capsys.readouterr().out
    assert "FITS: a GPU holds" in said
    assert said.count("Figure(900x") == 2
    assert "memplan estimate llama-3-8b --cluster 8xh100-sxm --zero 3" in said
    assert menus.menus["tp"].options == [1, 2, 4, 8]
    menus.show(tp=4, pp=1, zero=0, recompute="none", micro_batch=8, sequence_parallel=False)
    assert "use " in capsys.readouterr().out


def test_without_ipywidgets_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(MemplanError, match=r"pip install 'memplan\[widgets\]'"):
        planner("gpt2", cluster="1xh100-sxm", global_batch=8)
