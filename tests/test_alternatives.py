"""What would fit where no plan does: each is an estimate that fits, with a command that shows it."""

import pytest
from click.testing import CliRunner

import memplan
from memplan.cli import commands
from memplan.command import estimate_command, plan_values
from memplan.engines.options import plan_of
from memplan.hardware import cluster
from memplan.models import resolve
from memplan.search.alternatives import alternatives, alternatives_text


@pytest.fixture(scope="module")
def found():
    model, where = resolve("llama-3-70b"), cluster("8xh100-sxm")
    return list(alternatives(model, where, plan_of(global_batch=8, seq_len=8192)))


def test_offload_more_gpus_and_adapters_are_named_and_fit(found):
    assert [change for change, _ in found] == ["offload to the host", "32 GPUs", "LoRA of rank 16"]
    for _, estimate in found:
        assert estimate.fits
        assert (
            memplan.estimate(
                "llama-3-70b",
                cluster=estimate.cluster,
                global_batch=8,
                seq_len=8192,
                **_fields(estimate.plan),
            ).peak
            == estimate.peak
        )


def _fields(plan):
    said = plan_values(plan)
    return {name: value for name, value in said.items() if name not in ("global_batch", "seq_len")}


def test_half_as_many_gpus_do_not_fit(found):
    """The number is the first that fits, doubling: 16 do not, even with the plan that holds least."""
    table = memplan.search("llama-3-70b", cluster="16xh100-sxm", global_batch=8, seq_len=8192, micro_batch=1,
                           recompute="full", schedule="1f1b", virtual_stages=1, offload=False,
                           objective="memory", keep=1)  # fmt: skip
    assert set(table["verdict"]) <= {"does not fit", "cannot say", "refused"}
    assert found[1].estimate.cluster.n_gpus == 32


def test_a_shorter_sequence_is_named_where_it_fits():
    model, where = resolve("llama-3.2-1b"), cluster("1xrtx-4090")
    tried = alternatives(model, where, plan_of(global_batch=1, seq_len=32768, precision="bf16"))
    shorter = next(found.estimate for found in tried if found.change.startswith("sequences"))
    assert shorter.fits
    assert shorter.plan.seq_len < 32768


def test_offload_says_what_the_hosts_hold(found):
    estimate = found[0].estimate
    (note,) = [note for note in estimate.notes if note.startswith("offload")]
    assert "139.95 GiB for each GPU, 1.09 TiB for the 8 of a node" in note
    assert estimate.host.total_bytes * 8 / 2**40 == pytest.approx(1.09, abs=0.01)


@pytest.mark.parametrize("command", ["advise", "search"])
def test_a_command_that_finds_no_plan_says_what_would_fit(command):
    more = ["--recompute", "full"] if command == "search" else []
    asked = [
        command,
        "llama-3-8b",
        "--cluster",
        "1xrtx-4090",
        "--global-batch",
        "8",
        "--seq-len",
        "2048",
        *more,
    ]
    printed = CliRunner().invoke(commands, asked)
    assert printed.exit_code == 0
    text = alternatives_text(
        resolve("llama-3-8b"), cluster("1xrtx-4090"), plan_of(global_batch=8, seq_len=2048), "llama-3-8b"
    )
    assert text in printed.output
    assert "What would fit" in text
    assert max(map(len, printed.output.splitlines())) <= 80


def test_weights_that_fit_in_four_bits_alone_are_proposed_so():
    model, where = resolve("llama-2-13b"), cluster("1xrtx-4090")
    *_, found = alternatives(model, where, plan_of(global_batch=1, seq_len=2048))
    assert (found.change, found.estimate.plan.quantize) == ("QLoRA of rank 16", "nf4")
    assert found.estimate.fits


def test_where_nothing_fits_it_is_said_what_was_tried():
    text = alternatives_text(
        resolve("llama-3.1-405b"), cluster("1xrtx-4090"), plan_of(global_batch=1, seq_len=256)
    )
    assert " ".join(text.split()).startswith("Nothing tried fits either: offload, up to 1024 GPUs, sequences")


def test_the_commands_give_the_estimates(found):
    for _, estimate in found:
        printed = CliRunner().invoke(commands, estimate_command(estimate, "llama-3-70b").split()[1:])
        assert " FITS: " in printed.output.splitlines()[0]
