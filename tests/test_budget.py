"""What a training takes: by hand, from one step's time; nothing where there is none."""

from dataclasses import FrozenInstanceError, replace

import pytest

import memplan
from memplan.errors import InvalidValue, PlanRefused
from memplan.text_tables import WIDTH


@pytest.fixture(scope="module")
def planned():
    return memplan.estimate("llama-3-8b", cluster="8xh100-sxm", zero=3, global_batch=64, seq_len=4096)


def test_a_budget_by_hand(planned):
    found = memplan.budget(planned, tokens=64 * 4096 * 1000 + 1, price_per_gpu_hour=2.5)
    assert found.n_steps == 1001
    assert found.training_s == 1001 * planned.step_s
    assert found.days == pytest.approx(1001 * planned.step_s / 86400)
    assert found.gpu_hours == pytest.approx(1001 * planned.step_s / 3600 * 8)
    assert found.cost == pytest.approx(2.5 * found.gpu_hours)
    assert found.energy_kwh == pytest.approx(0.7 * found.gpu_hours)


def test_left_out_tokens_are_chinchillas(planned):
    found = memplan.budget(planned)
    assert found.tokens == found.chinchilla_tokens == 20 * 8_030_261_248
    assert found.cost is None
    assert memplan.budget(planned, tokens=15e12).tokens == 15 * 10**12


def test_training_flops_are_six_a_parameter_and_token(planned):
    """Kaplan's 6 N D beside what is counted: attention adds, the embedding's table does not count."""
    found = memplan.budget(planned)
    counted = found.n_steps * planned.total_model_flops
    assert counted == pytest.approx(6 * planned.n_parameters * found.tokens, rel=0.2)


def test_what_is_printed_and_what_is_plain(planned):
    found = memplan.budget(planned, price_per_gpu_hour=2)
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[0].startswith("llama-3-8b on 8xh100-sxm FITS: ")
    assert "Times add up" in str(found)
    assert found._repr_html_() == f"<pre>{found}</pre>"
    assert repr(found).startswith("<Budget of 160,605,224,960 tokens: ")
    plain = found.to_dict()
    assert plain["gpu_hours"] == found.gpu_hours
    assert plain["confidence"] == planned.time_model.label
    with pytest.raises(FrozenInstanceError):
        found.tokens = 1  # type: ignore[misc]


def test_a_board_of_unknown_power_has_no_energy(planned):
    gpu = replace(planned.cluster.gpu, board_power_w=None)
    found = memplan.budget(replace(planned, cluster=replace(planned.cluster, gpu=gpu)))
    assert found.energy_kwh is None
    assert "kWh" not in str(found)


@pytest.mark.parametrize(
    "asked,message",
    [
        ({"tokens": 0}, "tokens=0 is not allowed"),
        ({"tokens": 1.5}, r"tokens=1\.5 is not allowed; use an integer from 1"),
        ({"tokens": float("nan")}, "tokens=nan is not allowed"),
        ({"tokens": "15T"}, "tokens='15T' is not allowed"),
        ({"price_per_gpu_hour": -1}, "price_per_gpu_hour=-1 is not allowed; use a finite number above 0"),
    ],
)
def test_a_bad_value_is_refused(planned, asked, message):
    with pytest.raises(InvalidValue, match=message):
        memplan.budget(planned, **asked)


def test_what_does_not_fit_has_no_price():
    asked = memplan.estimate("llama-3-8b", cluster="8xh100-sxm")
    with pytest.raises(PlanRefused, match=r"^DOES NOT FIT: .* So there is no budget of llama-3-8b .*advise"):
        memplan.budget(asked, price_per_gpu_hour=2)


def test_without_a_step_time_there_is_no_budget():
    with pytest.raises(InvalidValue, match="no step time to plan by: no cluster was given; use a plan"):
        memplan.budget(memplan.estimate("gpt2"))
    with pytest.raises(InvalidValue, match="'gpt2' is no estimate"):
        memplan.budget("gpt2")  # type: ignore[arg-type]


def test_a_model_without_tokens_is_trained_on_samples():
    images = memplan.estimate("resnet-50", cluster="1xh100-sxm", micro_batch=8)
    with pytest.raises(
        InvalidValue, match=r"resnet-50 have no tokens, .*; use the number of samples to train on"
    ):
        memplan.budget(images)
    found = memplan.budget(images, tokens=1e6)
    assert ["samples", "1,000,000"] in map(str.split, str(found).splitlines())
    assert found.to_dict()["chinchilla_tokens"] is None
    assert "of 8 samples, " in str(found)
    assert "token" not in str(found)
