"""Launchers on the command line and as a registry: export, the way back, hostile files."""

import ast
import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan import InvalidValue, Llama, MemplanError, PlanRefused, estimate, preset
from memplan.cli import commands
from memplan.command import estimate_command, export_command
from memplan.launchers import LAUNCHERS, exported, read, targets

H100 = ("llama-3-8b", "--cluster", "8xh100-sxm", "--zero", "3", "--fsdp-units", "block+ends")


def run(*words):
    return CliRunner().invoke(commands, list(map(str, words)))


def as_json(planned):
    return json.loads(json.dumps(planned.to_dict()))


def test_export_prints_what_python_returns():
    said = run("export", *H100, "--implementation", "huggingface", "--to", "torchrun")
    planned = estimate(
        "llama-3-8b", implementation="huggingface", cluster="8xh100-sxm", zero=3, fsdp_units="block+ends"
    )
    assert said.exit_code == 0
    assert said.stdout == planned.export("torchrun")
    assert said.stderr == ""


def test_export_writes_a_file_and_notes_what_is_done_otherwise(tmp_path):
    file = tmp_path / "accelerate.yaml"
    said = run("export", *H100, "--implementation", "huggingface", "--to", "accelerate", "--out", file)
    assert said.stdout == f"{file}: for accelerate\n"
    assert said.stderr.startswith("Note: Accelerate keeps the head gathered")
    assert file.read_text().startswith("# llama-3-8b on 8 ranks")


def test_a_refusal_names_every_reason():
    words = ("--implementation", "reference", "--cluster", "8xh100-sxm", "--zero", "1")
    said = run("export", "llama-3-8b", *words, "--to", "torchtitan")
    assert said.exit_code == 2
    assert "zero=1: torchtitan shards by FSDP2" in said.stderr
    assert "zero=1" in said.stderr
    assert "clip_grad_norm is left out" in said.stderr


@pytest.mark.parametrize("to", ["torchtitan", "accelerate", "transformers"])
@pytest.mark.parametrize("plan", ["--zero 3", "--zero 1", "--tp 2 --sequence-parallel --global-batch 64"])
def test_a_refusal_ends_in_the_nearest_command_that_is_not_refused(to, plan):
    refused = run("export", "llama-3-8b", "--cluster", "8xh100-sxm", *plan.split(), "--to", to)
    assert refused.exit_code == 2
    _, found, command = " ".join(refused.stderr.split()).partition(
        "The nearest that it can be told: memplan "
    )
    if to == "torchtitan" or "--tp" not in plan:
        assert found
    said = run(*command.split()) if found else refused
    assert (said.exit_code == 0) == bool(found), said.stderr


def test_a_refusal_that_no_keyword_mends_ends_in_no_command():
    said = run("export", "gpt2", "--cluster", "8xh100-sxm", "--to", "torchtitan")
    assert "torchtitan trains its own modules; use llama-3-8b or llama-3-70b" in said.stderr
    assert "nearest" not in said.stderr


def test_the_script_of_a_file_reads_the_file(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 176}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "vocab_size": 100, **sizes}))
    text = run("export", file, "--dp", "2", "--seq-len", "64").stdout
    assert f"AutoConfig.from_pretrained('{file}')" in text
    assert f"memplan estimate {file}" in text


def test_the_next_command_of_a_plan():
    planned = estimate("llama-3-8b", implementation="huggingface", cluster="8xh100-sxm", zero=3)
    command = export_command(planned, "torchrun")
    assert command == estimate_command(planned).replace("estimate", "export") + " --to torchrun"
    assert run(*command.split()[1:]).stdout == planned.export("torchrun")


def test_the_targets_of_a_plan():
    def of(**plan):
        return targets(estimate("llama-3-8b", cluster="8xh100-sxm", **plan))

    assert LAUNCHERS.names()[:4] == ("torchrun", "torchtitan", "accelerate", "transformers")
    assert of() == ("torchrun",)
    ends = {"zero": 3, "fsdp_units": "block+ends"}
    assert of(implementation="huggingface", **ends) == ("torchrun", "accelerate", "transformers")
    assert of(implementation="torchtitan", clip_grad_norm=1.0, **ends) == ("torchrun", "torchtitan")
    assert of(engine="textbook") == ()


@pytest.mark.parametrize("name", ['"""\nimport os', "\\", "a\n# b", "\x1b[2J"])
def test_a_name_ends_no_docstring_and_no_comment(name):
    model = replace(preset("llama-3-8b"), name=name)
    scripts = [
        ast.parse(estimate(one, implementation="huggingface", dp=2).export("torchrun"))
        for one in (model, preset("llama-3-8b"))
    ]
    odd, usual = ([ast.dump(each) for each in script.body[1:]] for script in scripts)
    assert odd == usual
    planned = estimate(model, implementation="huggingface", cluster="8xh100-sxm")
    head = exported(planned, "accelerate").text.partition("compute_environment")[0]
    assert all(line.startswith("#") and line.isprintable() for line in head.splitlines())


def test_a_file_of_a_launcher_is_a_plan_and_flags_beside_it_win(tmp_path):
    pytest.importorskip("yaml")
    file = tmp_path / "accelerate.yaml"
    planned = estimate(
        "llama-3-8b", implementation="huggingface", cluster="8xh100-sxm", zero=3, fsdp_units="block+ends",
        precision="bf16-mixed-reduce-bf16", no_sync=True,
    )  # fmt: skip
    file.write_text(planned.export("accelerate"))
    asked = ("estimate", "llama-3-8b", "--accelerate", file, "--cluster", "8xh100-sxm", "--json")
    assert json.loads(run(*asked).stdout) == as_json(planned)
    plan = json.loads(run(*asked, "--zero", "2").stdout)["plan"]
    assert (plan["zero"], plan["fsdp_units"], plan["precision"]) == (2, "block+ends", planned.plan.precision)
    assert run(*asked).stderr.startswith("Note: Accelerate reduces gradients in bfloat16")


def test_a_file_of_torchtitan_names_the_model(tmp_path):
    file = tmp_path / "train.sh"
    plan: dict[str, Any] = {
        "cluster": "8xh100-sxm",
        "zero": 3,
        "fsdp_units": "block+ends",
        "clip_grad_norm": 1.0,
        "optimizer_impl": "fused",
    }
    planned = estimate("llama-3-8b", implementation="torchtitan", **plan)
    file.write_text(planned.export("torchtitan"))
    assert json.loads(
        run("estimate", "--torchtitan", file, "--cluster", "8xh100-sxm", "--json").stdout
    ) == as_json(planned)


@pytest.mark.parametrize(
    "words,why",
    [
        ((), "Missing argument 'MODEL'."),
        (("--accelerate", "a.yaml", "--torchtitan", "b.sh"), "--torchtitan and --accelerate are two plans"),
        (("--torchtitan", "none.sh"), "none.sh: no such file"),
        (("package:factory", "--accelerate", "a.yaml"), "plan a function of yours by flags"),
    ],
)
def test_what_is_no_plan_is_refused_in_one_line(words, why):
    said = run("estimate", *words)
    assert said.exit_code == 2
    assert why in said.stderr
    assert said.stderr.count("\n") == 1


def test_a_file_without_a_model_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("distributed_type: MULTI_GPU")
    with pytest.raises(InvalidValue, match=r"a.yaml: names no model; give one"):
        read(tmp_path / "a.yaml", "accelerate")


def test_a_launcher_that_only_writes_reads_nothing(tmp_path):
    (tmp_path / "train.py").write_text("")
    with pytest.raises(InvalidValue, match=r"train.py: it is written and not read back"):
        read(tmp_path / "train.py", "torchrun")


TINY = Llama(name="tiny", n_layers=2, d_model=32, n_heads=2, d_ff=64, vocab_size=128, max_seq_len=32)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)
KEYS = st.sampled_from([
    *("distributed_type", "mixed_precision", "num_processes", "fsdp_config", "parallelism_config"),
    *("fsdp_version", "fsdp_reshard_after_forward", "parallelism_config_tp_size", "machine_rank"),
])  # fmt: skip
NAMES = st.sampled_from([
    *("model.name", "model.flavor", "training.max_norm", "training.seq_len", "training.dtype"),
    *("parallelism.pipeline_parallel_degree", "parallelism.pipeline_parallel_layers_per_stage"),
    *("parallelism.pipeline_parallel_schedule", "activation_checkpoint.mode", "optimizer.name"),
])  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(values=st.dictionaries(KEYS, VALUES | st.dictionaries(KEYS, VALUES, max_size=3), max_size=5))
def test_no_file_of_accelerate_breaks_its_reader(values):
    yaml = pytest.importorskip("yaml")
    kind = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
    for text in (yaml.safe_dump(values), yaml.safe_dump(kind | values)):
        planned_or_refused("accelerate", text)


@settings(max_examples=300, deadline=None)
@given(
    values=st.dictionaries(
        NAMES, st.integers() | st.text(max_size=5) | st.booleans() | st.lists(st.integers())
    )
)
def test_no_file_of_torchtitan_breaks_its_reader(values):
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    usual = ['model.flavor = "8B"', 'activation_checkpoint.mode = "full"']
    kept = [line for line in usual if line.split()[0] not in values]
    planned_or_refused("torchtitan", "\n".join([*lines, *kept]))
    flags = [f"--{name}={value}" for name, value in values.items()]
    planned_or_refused("torchtitan", " ".join(["--module llama3 --config llama3_8b", *flags]))


@settings(max_examples=300, deadline=None)
@given(of=st.sampled_from(["accelerate", "torchtitan"]), text=st.text(max_size=40))
def test_no_text_breaks_a_reader(of, text):
    planned_or_refused(of, text)


def planned_or_refused(of, text):
    with suppress(MemplanError):
        found = LAUNCHERS.named(of).read(text, TINY)
        estimate(**{"model": TINY, **found.keywords, "seq_len": 32})


@pytest.mark.parametrize(
    "of,text,why",
    [
        ("accelerate", "a: &a [x, x]\nb: [*a, *a]\ndistributed_type: *a", "has an alias"),
        ("accelerate", "[" * 5000, "is not YAML"),
        ("accelerate", "num_processes: " + "9" * 5000, "is not YAML"),
        ("accelerate", "distributed_type: 'NO'\nnum_processes: 8", "num_processes=8 contradicts"),
        (
            "accelerate",
            "distributed_type: MULTI_GPU\nparallelism_config: {tp_size: 2}",
            "needs distributed_type FSDP",
        ),
        ("torchtitan", "a" + ".a" * 5000 + " = 1", "neither flags|is no model that is planned so"),
        ("torchtitan", "a = " + "[" * 5000, "neither flags"),
    ],
)
def test_a_hostile_file_is_refused(of, text, why):
    pytest.importorskip("yaml")
    with pytest.raises(InvalidValue, match=why):
        LAUNCHERS.named(of).read(text, TINY)


def test_a_plan_of_another_engine_is_refused():
    with pytest.raises(PlanRefused, match="engine='textbook': it runs plans of 'torch'; use engine='torch'"):
        estimate("llama-3-8b", dp=2, engine="textbook").export("torchrun")
