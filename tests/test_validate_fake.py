"""Tensors without data: what is seen of them is what real CPU ranks hold and send, to the byte."""

from collections.abc import Iterator
from dataclasses import replace
from math import isnan

import pytest
import torch
from click.testing import CliRunner

from memplan import Plan
from memplan.engines.options import plan_of
from memplan.errors import InvalidValue
from memplan.units import GiB
from tests.test_validate_gpu import H100
from tests.tiny import TINY
from validate import fake
from validate.__main__ import main
from validate.cases import FAKE_STEPS, Case, placed, runnable
from validate.environment import environment
from validate.fake import without_data
from validate.judge import References, judged
from validate.launch import ForkServers, run_case
from validate.measure import RankMeasurement
from validate.suites.fullsize import fullsize


@pytest.fixture(scope="module")
def servers() -> Iterator[ForkServers]:
    with ForkServers() as started:
        yield started


def tiny(**plan) -> Case:
    settings = {"seq_len": 16, "global_batch": 4, "precision": "fp32", **plan}
    return Case(name="tiny", model=TINY, plan=plan_of(**settings), timeout_s=60.0)


def faked(case: Case, rank: int = 0) -> Case:
    return replace(case, backend="fake", rank=rank, tensors="fake", steps=FAKE_STEPS)


def alone(case: Case, servers: ForkServers) -> RankMeasurement:
    ended = run_case(case, servers=servers)
    assert ended.outcome == "ok", ended.reason
    (measured,) = ended.ranks
    return measured


def sent(measured: RankMeasurement) -> list[str]:
    return sorted(map(str, measured.collectives))


@pytest.mark.parametrize(
    "plan",
    [
        {"precision": "bf16-mixed", "recompute": "full"},
        {"dp": 2},
        {"dp": 2, "zero": 1, "precision": "bf16-mixed"},
        {"tp": 2},
    ],
    ids=str,
)
def test_every_rank_is_the_real_one_to_the_byte(plan, servers):
    case = tiny(**plan)
    ended = run_case(case, servers=servers)
    assert ended.outcome == "ok", ended.reason
    for real in ended.ranks:
        shapes = alone(faked(case, real.rank), servers)
        assert shapes.states == real.states
        assert sent(shapes) == sent(real)
        assert shapes.memory.rest_bytes == real.memory.rest_bytes
        assert shapes.memory.peak_bytes == real.memory.peak_bytes


@pytest.mark.parametrize(
    "plan",
    [
        {"dp": 2, "tp": 2, "zero": 3, "sequence_parallel": True},
        {"dp": 2, "zero": 3, "precision": "bf16-mixed", "recompute": "full"},
        {"pp": 2, "tp": 2, "schedule": "1f1b"},
    ],
    ids=str,
)
def test_where_gloo_has_scratch_the_peak_is_that_of_a_real_stand_in(plan, servers):
    case = tiny(**plan)
    ended = run_case(case, servers=servers)
    assert ended.outcome == "ok", ended.reason
    for real in (ended.ranks[0], ended.ranks[-1]):
        shapes = alone(faked(case, real.rank), servers)
        assert (shapes.states, sent(shapes)) == (real.states, sent(real))
        assert shapes.memory.rest_bytes == real.memory.rest_bytes
        stand_in = alone(replace(case, backend="fake", rank=real.rank), servers)
        assert shapes.memory.peak_bytes == stand_in.memory.peak_bytes <= real.memory.peak_bytes


def test_a_large_model_runs_at_its_true_size():
    plan = Plan(dp=512, tp=8, zero=1, sequence_parallel=True, seq_len=8192, recompute="full")
    record = judged(faked(Case(name="8b", model=runnable("llama-3-8b"), plan=plan), rank=4095), References())
    assert record.confirmed, record.reason
    assert record.fullest_peaks is not None
    predicted, measured = record.fullest_peaks
    assert measured > 8 * GiB
    assert predicted == measured


def test_what_it_is_is_said():
    said = environment(faked(tiny()))
    assert (said["device"], said["backend"], said["tensors"]) == ("cpu", "fake", fake.MEANING)
    assert "tensors" not in environment(tiny())
    name = "llama-3-8b, one rank bf16 impl=fused, 1 x 8192, rank 0"
    done = CliRunner().invoke(main, ["sweep", "--suite", "fullsize", "--only", name])
    assert done.exit_code == 0, done.output
    assert f"fullsize: {fake.MEANING}" in done.output


def test_its_steps_are_not_timed_and_its_training_is_not_checked(servers):
    measured = alone(faked(tiny()), servers)
    assert measured.step_s == ()
    record = judged(faked(tiny()), References())
    assert record.unchecked.startswith("not checked at all")
    assert record.loss_error is None


def test_there_is_no_such_thing_on_a_gpu():
    with pytest.raises(InvalidValue, match="runs on CPU, on tensors without data"):
        placed(faked(tiny()), H100)
    assert placed(faked(tiny()), None) == faked(tiny())


def test_integers_and_masks_are_known_and_floats_are_not():
    with without_data(paths=False):
        tokens = torch.arange(6).reshape(2, 3)
        assert int((tokens * 2).sum()) == 30
        assert (tokens > 2).nonzero().shape == (3, 2)
        assert isnan(torch.randn(4).sum())
        with pytest.raises(NotImplementedError, match="only what follows from integers is known"):
            bool((torch.randn(4) > 0).any())


def test_storages_are_seen_from_birth_to_death():
    with without_data(paths=True) as lifetimes, lifetimes.profile() as profile:
        kept = torch.empty(1 << 40, dtype=torch.uint8)
        view = kept[1:]
        other = kept + 1
        del kept, other
        view.untyped_storage().resize_(0)
    seen = [(event.n_bytes, event.total_bytes) for event in profile.recorded(()).events]
    assert seen == [(2**40, 2**40), (2**40, 2**41), (-(2**40), 2**40), (-(2**40), 0)]


def test_the_suite_is_of_true_sizes():
    cases = fullsize()
    assert len({case.name for case in cases}) == len(cases) >= 60
    assert {case.tensors for case in cases} == {"fake"}
    assert {runnable(name) for name in ("llama-3-8b", "llama-3-70b", "llama-3.1-405b")} <= {
        case.model for case in cases
    }
    assert max(case.plan.world_size for case in cases) == 2048
