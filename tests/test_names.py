"""Names that people type: other names of presets, repositories of the Hub, and what is not modelled yet."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any, cast

import pytest
from click.testing import CliRunner

import memplan
from memplan.cli import commands
from memplan.engines.options import USUAL_ENGINE, EngineOptions, plan_fields
from memplan.errors import InvalidValue, MemplanError, UnknownName, did_you_mean
from memplan.models import preset, preset_named, preset_names, resolve
from memplan.models.hub import hub_config, is_repository
from memplan.models.presets import preset_table
from memplan.names import OPTIONS, words
from memplan.plan import FIELDS
from memplan.unmodelled import ROWS, not_modelled, not_modelled_list


@pytest.mark.parametrize(
    "said,name",
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("llama3-8b", "llama-3-8b"),
        ("Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.3-70b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama-3.1-8b"),
        ("gemma-3-4b-it", "gemma-3-4b-text"),
        ("mistral-small-24b-base-2501", "mistral-small-24b"),
        ("bert-large-uncased", "bert-large"),
        ("gpt-2", "gpt2"),
    ],
)
def test_a_model_by_another_name_is_read_and_said_aloud(said, name):
    model = resolve(said)
    assert (model, model.name) == (preset(name), name)
    note = f"{said} is read as {name}."
    assert note in memplan.estimate(said, seq_len=min(64, model.max_seq_len)).notes
    assert memplan.estimate(name, seq_len=min(64, model.max_seq_len)).to_dict()["notes"] == [
        each for each in memplan.estimate(said, seq_len=min(64, model.max_seq_len)).notes if each != note
    ]


def test_a_name_in_capitals_is_the_name_and_not_worth_a_word():
    assert resolve("LLAMA-3-8B").remarks == resolve("llama-3-8b").remarks == ()


def test_a_repository_of_another_context_has_that_context():
    model = resolve("Qwen/Qwen2.5-7B-Instruct")
    assert model == replace(preset("qwen2.5-7b"), max_seq_len=32768)
    note = "Qwen/Qwen2.5-7B-Instruct is read as qwen2.5-7b with a context of 32768 tokens."
    assert memplan.estimate("Qwen/Qwen2.5-7B-Instruct", seq_len=64).notes == (note,)


@pytest.mark.parametrize(
    "said", ["llama-33-8b", "gemma-29b", "google/gemma-3-4b-it", "llama-3-8b+", "llama-3"]
)
def test_a_name_that_only_resembles_one_is_not_read_as_it(said):
    assert preset_named(said) is None


def test_no_two_presets_share_a_name():
    """Each of a preset's own and other names stands for it, and for no other."""
    for name, entry in preset_table().items():
        for said in (name, *entry.get("also", ()), *entry.get("contexts", ())):
            assert preset_named(said).preset == name, said
            assert preset_named(said.rpartition("/")[2]).preset == name, said
    assert len({words(name) for name in preset_names()}) == len(preset_names())


@pytest.mark.parametrize(
    "name", [name for name in preset_names() if "config.json of" in preset_table()[name]["source"]]
)
def test_a_preset_is_known_by_its_repository(name):
    repository = re.search(r"config\.json of (\S+/[^\s;,]+)", preset_table()[name]["source"])[1]
    assert preset_named(repository).preset == name


def test_the_command_names_the_model_as_it_was_typed():
    run = CliRunner().invoke(
        commands,
        [
            "search",
            "llama3-8b",
            "--cluster",
            "8xH100",
            "--global-batch",
            "8",
            "--seq-len",
            "512",
            "--zero",
            "3",
            "--tp",
            "1",
            "--pp",
            "1",
            "--micro-batch",
            "1",
            "--recompute",
            "none",
        ],
    )
    assert run.exit_code == 0, run.output
    assert "memplan estimate llama3-8b --cluster 8xh100-sxm --zero 3" in run.output
    said = " ".join(run.output.split())
    assert "llama3-8b is read as llama-3-8b." in said
    assert "8xH100 is read as 8xh100-sxm." in said


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-4.5", "gpt-oss-20b", "whisper-large-v3", "t5-small"])
def test_no_model_is_suggested_that_is_not_near(name):
    assert did_you_mean(name, [each for each in preset_names() if each[:3] != name[:3]]) == "."


def test_no_precision_is_suggested_that_is_not_near():
    assert did_you_mean("fp9", ["fp32", "bf16"]) == "."


def test_an_unknown_model_is_one_sentence_and_a_way_out_without_the_table():
    said = f"unknown model 'nonsense'. `memplan models` lists the {len(preset_names())} presets; use one "
    with pytest.raises(
        UnknownName,
        match=f"^{re.escape(said)}of them, the path of .*, or a repository of the Hugging Face Hub",
    ):
        resolve("nonsense")
    run = CliRunner().invoke(commands, ["estimate", "nonsense"])
    assert (run.exit_code, len(run.output.splitlines())) == (2, 1)
    assert len(run.output) < 250


# --- The Hub ---

TINY = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 320, "max_position_embeddings": 64}  # fmt: skip
REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of the Hub with the config.json of mine/Tiny, as huggingface_hub keeps it."""
    constants = pytest.importorskip("huggingface_hub.constants")
    repository = tmp_path / "models--mine--Tiny"
    (repository / "snapshots" / REVISION).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    (repository / "snapshots" / REVISION / "config.json").write_text(json.dumps(TINY))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_a_cached_repository_is_read(cache, tmp_path):
    model = resolve("mine/Tiny")
    assert (model.name, model.n_blocks, model.max_seq_len) == ("Tiny", 3, 64)
    note = "mine/Tiny is read from its config.json on the Hugging Face Hub, revision 0123456789ab."
    assert memplan.estimate("mine/Tiny").notes == (note,)


def test_a_repository_that_cannot_be_reached_is_one_sentence_with_the_command(cache):
    command = re.escape(
        "run `hf download mine/Other config.json --local-dir Other` where the Hub can be reached"
    )
    with pytest.raises(
        InvalidValue, match=rf"^mine/Other is no preset and no path, .*; {command}, and use ./Other\.$"
    ):
        resolve("mine/Other")


def test_without_huggingface_hub_it_is_said_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        InvalidValue, match=r"\(huggingface_hub is not installed: pip install huggingface_hub\); run"
    ):
        hub_config("mine/Tiny")


def test_a_folder_goes_before_the_hub(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "mine" / "Tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TINY | {"num_hidden_layers": 2}))
    assert (resolve("mine/Tiny").n_blocks, resolve("mine/Tiny").remarks) == (2, ())


def test_a_preset_needs_neither_the_hub_nor_its_library():
    code = (
        "import sys; sys.modules['huggingface_hub'] = None; import memplan; memplan.estimate('Qwen/Qwen3-8B')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "text", ["./mine", "a/b/c", "mine/config.json", "/etc", "mine/", "../x", "a b/c", "x" * 99 + "/y"]
)
def test_a_path_is_no_repository(text):
    assert not is_repository(text)


# --- What is not modelled yet ---

ASKED = [
    (["--precision", "fp8"], {"precision": "fp8"}, "precision='fp8'"),
    (["--ulysses", "2"], {"ulysses": 2}, "ulysses"),
    (["--torch-compile"], {"torch_compile": True}, "torch_compile"),
    (["--compile", "model"], {"compile": "model"}, "compile='model'"),
    (["--optimizer", "adam4bit"], {"optimizer": "adam4bit"}, "optimizer='adam4bit'"),
    (["--optimizer", "paged_adam_8bit"], {"optimizer": "paged_adam_8bit"}, "optimizer='paged_adam_8bit'"),
    (["--optimizer", "came"], {"optimizer": "came"}, "optimizer='came'"),
    (["--optimizer", "Lion"], {"optimizer": "Lion"}, "optimizer='Lion'"),
    (["--optimizer", "muonclip"], {"optimizer": "muonclip"}, "optimizer='muonclip'"),
]


@pytest.mark.parametrize("flags,keywords,said", ASKED, ids=[" ".join(flags) for flags, _, _ in ASKED])
def test_what_is_not_modelled_is_known_by_name(flags, keywords, said):
    sentence = rf"{re.escape(said)} is not modelled yet: [^;]+; meanwhile [^;]+\.$"
    for function in (memplan.estimate, memplan.search):
        with pytest.raises(MemplanError, match=f"^{sentence}"):
            function("gpt2", cluster="8xh100-sxm", global_batch=8, **keywords)
    for command in (
        ["estimate", "gpt2"],
        ["search", "gpt2", "--cluster", "8xh100-sxm", "--global-batch", "8"],
    ):
        run = CliRunner().invoke(commands, [*command, *flags])
        assert run.exit_code == 2
        assert re.search(sentence, run.output.replace(flags[0], said) if "=" not in said else run.output)
        assert "did you mean" not in run.output


def test_a_plan_to_compare_knows_them_too():
    run = CliRunner().invoke(
        commands, ["compare", "gpt2", "ulysses=2", "dp=8", "--cluster", "8xh100-sxm", "--global-batch", "8"]
    )
    assert (run.exit_code, "Error: ulysses is not modelled yet: sequence parallelism by" in run.output) == (
        2,
        True,
    )


def test_a_row_is_of_nothing_that_is_modelled():
    """What becomes modelled is taken out of the table: its names are then a plan's, and no row's."""
    for row in ROWS:
        assert row.keywords or row.values
        assert not set(row.keywords.split()) & set(plan_fields(USUAL_ENGINE)), row.what
        for field, names in row.values.items():
            for name in names.split():
                with pytest.raises(MemplanError, match=f"^{field}='{name}' is not modelled yet"):
                    memplan.estimate("gpt2", **cast(Any, {field: name}))


def test_each_name_is_of_one_row():
    keywords = [words(name) for row in ROWS for name in row.keywords.split()]
    values = [
        (field, words(name)) for row in ROWS for field, names in row.values.items() for name in names.split()
    ]
    assert len(keywords) == len(set(keywords))
    assert len(values) == len(set(values))


def test_a_removed_row_is_all_that_is_needed(monkeypatch):
    kept = tuple(row for row in ROWS if "ulysses" not in row.keywords.split())
    assert len(kept) == len(ROWS) - 1
    monkeypatch.setattr("memplan.unmodelled.ROWS", kept)
    assert not_modelled("option of a plan", "ulysses") is None
    assert not any("by all-to-all" in line for line in not_modelled_list())
    run = CliRunner().invoke(commands, ["estimate", "gpt2", "--ulysses", "2"])
    assert "no such flag --ulysses" in run.output


def test_the_list_for_documentation_has_every_row():
    lines = list(not_modelled_list())
    assert len(lines) == len(ROWS)
    assert all(re.fullmatch(r"- \*\*.+\*\* \(`.+`\) .+; meanwhile .+\.", line) for line in lines)


def test_other_frameworks_names_of_options_are_of_one_option_and_of_no_row():
    others = [words(name) for names in OPTIONS.values() for name in names.split()]
    own = {*map(words, FIELDS), *map(words, EngineOptions.__annotations__), words("cluster")}
    assert len(others) == len(set(others))
    assert not set(others) & {words(name) for row in ROWS for name in row.keywords.split()}
    assert not set(others) & own
    assert {words(option.partition("=")[0]) for option in OPTIONS} <= own


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--batch-size 4", "--batch-size is called --micro-batch in memplan."),
        ("--gradient-checkpointing", "--gradient-checkpointing is called --recompute full in memplan."),
        ("--gpus 8", "--gpus is called --cluster 8xh100-sxm in memplan."),
        ("--tq 3", "no such flag --tq; did you mean '--tp'?"),
        ("--purple", "no such flag --purple."),
        ("--model gpt2", "MODEL is given without --model."),
    ],
)
def test_a_flag_of_another_framework_is_answered_with_memplans(flags, said):
    run = CliRunner().invoke(commands, ["estimate", "gpt2", *flags.split()])
    assert run.exit_code == 2
    assert run.output.startswith(f"Error: {said}")


def test_a_keyword_of_another_framework_is_answered_with_memplans():
    with pytest.raises(UnknownName, match="gradient_checkpointing is called recompute='full' in memplan"):
        memplan.estimate("gpt2", **cast(Any, {"gradient_checkpointing": True}))
