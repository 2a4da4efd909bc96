"""config.json files: read as they are, or refused with the value, the rule and a way out."""

import contextlib
import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memplan
from memplan import MissingRule
from memplan.errors import InvalidValue, MemplanError, UnknownName
from memplan.models import TracedModel, implemented, model_from_config, preset
from memplan.models.families import FAMILIES
from memplan.models.huggingface_llama import HuggingFaceLlama

GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


@pytest.fixture
def without_transformers(monkeypatch):
    monkeypatch.setattr("memplan.models.lookup._traced", lambda *_: None)


@pytest.fixture
def read(tmp_path):
    """Reads a configuration given as a dict, text or bytes."""

    def reader(content, name="config.json"):
        data = json.dumps(content) if isinstance(content, dict) else content
        file = tmp_path / name
        file.write_bytes(data if isinstance(data, bytes) else data.encode())
        return model_from_config(file)

    return reader


def sizes(model):
    return {field: getattr(model, field) for field in type(model).__dataclass_fields__ if field != "name"}


def test_the_published_gpt2_is_the_preset(read):
    assert implemented(read(GPT2, "gpt2.json"), "reference") == preset("gpt2")


def test_the_published_llama_3_8b_is_the_preset(read):
    assert implemented(read(LLAMA_3_8B, "llama-3-8b.json"), "reference") == implemented(
        preset("llama-3-8b"), "reference"
    )


def test_absent_and_null_keys_take_transformers_defaults(read):
    assert sizes(read({"model_type": "gpt2"})) == sizes(read(GPT2))
    llama = read({"model_type": "llama", "num_key_value_heads": None, "head_dim": None})
    named = replace(llama, name="llama-2-7b", max_seq_len=4096)
    assert implemented(named, "reference") == implemented(preset("llama-2-7b"), "reference")


def test_every_key_is_read(read):
    assert read(GPT2 | {"n_inner": 100}).d_ff == 100
    assert read(GPT2 | {"n_inner": None}).d_ff == 3072
    assert read(GPT2 | {"tie_word_embeddings": False}).tied_head is False
    assert read(GPT2 | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)).dropout == 0.0
    llama = read(LLAMA_3_8B | {"head_dim": 64, "attention_bias": True, "mlp_bias": True})
    assert isinstance(llama, HuggingFaceLlama)
    assert (llama.d_head, llama.attention_bias, llama.mlp_bias) == (64, True, True)
    assert read(LLAMA_3_8B | {"tie_word_embeddings": True}).tied_head is True


def test_rope_theta_is_read_where_transformers_5_writes_it(read):
    config = {"model_type": "llama", "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}
    assert read(config).rope_theta == 500000.0
    assert read({"model_type": "llama"}).rope_theta == 10000.0


@pytest.mark.parametrize(
    "stored",
    [
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ],
    ids=lambda stored: stored["quant_method"],
)
@pytest.mark.parametrize("config", [GPT2, LLAMA_3_8B], ids=["gpt2", "llama"])
def test_the_format_that_a_vendor_stores_weights_in_is_noted_and_ignored(read, config, stored):
    plain, model = read(config), read(config | {"quantization_config": stored})
    assert model == plain
    (note,) = memplan.estimate(model, seq_len=64, precision="bf16").notes
    assert note.startswith(
        "quantization_config is ignored: it says that the published weights are stored as "
    )
    assert stored["quant_method"] in note
    assert memplan.estimate(plain, seq_len=64, precision="bf16").notes == ()


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq"])
def test_weights_that_are_trained_through_adapters_are_not_planned_as_if_all_were(read, method):
    stored = {"quant_method": method, "load_in_4bit": True}
    with pytest.raises(
        InvalidValue, match=r"is not planned by memplan; remove it to plan training of all weights, .*QLoRA"
    ):
        read(LLAMA_3_8B | {"quantization_config": stored})


DATA = Path(__file__).parents[1] / "data"
READERS = {kind for name in FAMILIES.own for kind in FAMILIES.named(name).readers}
DOWNLOADED: list[dict[str, Any]] = [
    json.loads(line) for line in (DATA / "published" / "downloads.jsonl").read_text().splitlines()
]
"""Much downloaded models: their config.json as published, where that is from, and their parameters."""

HERE = 43
"""The first of them, which are traced here; `tests.downloads` plans all, and writes what it finds."""

REFUSED = {
    *("t5-small", "all-MiniLM-L6-v2", "electra-base-discriminator", "bart-large-mnli", "dinov2-base"),
    *("swin-tiny-patch4-window7-224", "clip-vit-base-patch32", "siglip-base-patch16-224"),
    *("Qwen2.5-VL-7B-Instruct", "wav2vec2-base-960h"),
    "hubert-base-ls960",
}
"""The ones that may be refused; every other one is answered."""


FEWER: dict[str, dict[str, Any]] = {
    "deepseek-ai/DeepSeek-V3": {"num_hidden_layers": 4},
    "google/gemma-3-4b-it": {
        "text_config": {"num_hidden_layers": 6},
        "vision_config": {"num_hidden_layers": 2},
    },
    "llava-hf/llava-1.5-7b-hf": {
        "text_config": {"num_hidden_layers": 3},
        "vision_config": {"num_hidden_layers": 4},
    },
}
"""Blocks of models that take a minute or more to trace in full; no number of parameters is compared for them.

DeepSeek's are three dense ones and one with experts; Gemma's six are one period of its attention.
"""


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A configuration with other values, in its parts too."""
    return config | {
        key: changed(config[key], value) if isinstance(value, dict) else value
        for key, value in changes.items()
    }


def _downloaded(row: dict[str, Any]) -> Any:
    """A case of the test below: one that is traced takes seconds."""
    marks = [] if row["config"]["model_type"] in READERS else [pytest.mark.slow]
    return pytest.param(row, marks=marks, id=row["model"])


def test_the_much_downloaded_models_are_of_all_kinds():
    assert len(DOWNLOADED) == len({row["model"] for row in DOWNLOADED}) == 100
    assert {row["kind"] for row in DOWNLOADED} == {"language", "vision", "speech", "multimodal"}
    assert all(len(row["source"]) > 15 for row in DOWNLOADED)


@pytest.mark.parametrize("row", [_downloaded(row) for row in DOWNLOADED[:HERE]])
def test_a_published_config_is_answered_or_refused_in_one_sentence(read, row):
    if row["config"]["model_type"] not in READERS:
        pytest.importorskip("transformers")
    try:
        model = read(changed(row["config"], FEWER.get(row["model"], {})))
        of_image = model.image_tokens if isinstance(model, TracedModel) else 0
        estimated = memplan.estimate(model, seq_len=of_image + min(64, model.max_seq_len))
    except MemplanError as refusal:
        said = str(refusal).partition("config.json: ")[2]
        assert row["model"].partition("/")[2] in REFUSED, said
        assert len(said) < 500
        assert said.endswith(".")
        assert "\n" not in said
        return
    if "parameters" in row:
        assert memplan.parameter_count(model) == row["parameters"]
    assert estimated.worst.peak_bytes > 16 * memplan.parameter_count(model)
    assert any("quantization_config" in note for note in estimated.notes) == (
        "quantization_config" in row["config"]
    )


def test_the_architecture_alone_is_enough(read):
    assert read({"architectures": ["GPT2LMHeadModel"]}).code == "transformers 5.23, GPT2LMHeadModel"
    assert isinstance(read({"architectures": ["LlamaForCausalLM"]}), HuggingFaceLlama)


def test_the_name_is_the_folders_or_the_files(read, tmp_path):
    assert read(GPT2).name == tmp_path.name
    assert read(GPT2, "my-gpt.json").name == "my-gpt"


@pytest.mark.parametrize(
    "config,message",
    [
        ({"model_type": "mixtral"}, "unknown model architecture 'mixtral'"),
        ({"model_type": "lama"}, r"unknown model architecture 'lama'; did you mean 'llama'\?"),
        ({"architectures": ["MambaForCausalLM"]}, "unknown model architecture 'MambaForCausalLM'"),
        ({"model_type": 7}, "unknown model architecture '7'"),
        (
            {"model_type": "llama", "architectures": ["LlamaForTokenClassification"]},
            "unknown llama architecture",
        ),
        ({"model_type": "gpt2", "architectures": ["GPT2DoubleHeadsModel"]}, "unknown gpt2 architecture"),
    ],
)
def test_an_unknown_architecture_is_refused_by_name(read, monkeypatch, config, message):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnknownName, match=message):
        read(config)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"n_layer": 10**30}, r"n_layer=1000\d+ is not allowed; use an integer from 1 to"),
        ({"n_layer": 0}, "n_layer=0 is not allowed"),
        ({"n_layer": -1}, "n_layer=-1 is not allowed"),
        ({"n_layer": 12.0}, "n_layer=12.0 is not allowed"),
        ({"n_layer": True}, "n_layer=True is not allowed"),
        ({"n_layer": "12"}, "n_layer='12' is not allowed"),
        ({"n_layer": [12]}, r"n_layer=\[12\] is not allowed"),
        ({"n_layer": {}}, r"n_layer=\{\} is not allowed"),
        ({"n_head": 7}, "n_heads=7 does not divide d_model=768; use one of"),
        ({"resid_pdrop": 0.2}, "differ, but a memplan Gpt has one dropout; set all three equal"),
        ({"attn_pdrop": 1.0}, "attn_pdrop=1.0 is not allowed"),
        ({"attn_pdrop": "0.1"}, "attn_pdrop='0.1' is not allowed"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' is not allowed; use True or False"),
        (
            {"activation_function": "relu"},
            "activation_function='relu' is not allowed; memplan knows gelu_new",
        ),
        ({"activation_function": []}, r"activation_function=\[\] is not allowed"),
        ({"add_cross_attention": True}, "add_cross_attention=True is not planned by memplan; remove it"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn=True is not planned"),
        ({"quantization_config": {"bits": 4}}, "is not planned by memplan; remove it"),
        ({"architectures": "GPT2LMHeadModel"}, "architectures='GPT2LMHeadModel' is not allowed; use a list"),
        ({"architectures": ["GPT2LMHeadModel", "X"]}, "use a list of one name"),
        ({"architectures": [["GPT2LMHeadModel"]]}, "use a list of one name"),
        (
            {"model_type": None, "architectures": []},
            "names neither model_type nor architectures; add model_type",
        ),
    ],
)
def test_a_bad_gpt2_value_is_named_with_its_rule(without_transformers, read, change, message):
    with pytest.raises(InvalidValue, match=message):
        read(GPT2 | change)


@pytest.mark.parametrize(
    "change,message",
    [
        (
            {"num_key_value_heads": 5},
            "n_kv_heads=5 does not divide n_heads=32; use one of 1, 2, 4, 8, 16, 32",
        ),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0 is not allowed"),
        (
            {"attention_dropout": 0.1},
            "attention_dropout=0.1 is not allowed: memplan has no rule for it here; set it to 0.0",
        ),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not allowed; memplan knows silu"),
        ({"rope_theta": -1}, "rope_theta=-1 is not allowed; use a positive number"),
        ({"rope_theta": "10000"}, "rope_theta='10000' is not allowed"),
        ({"rope_theta": 10**400}, "rope_theta=1000.* is not allowed"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\] is not allowed; use an object"),
        ({"vocab_size": 1e30}, r"vocab_size=1e\+30 is not allowed"),
    ],
)
def test_a_bad_llama_value_is_named_with_its_rule(without_transformers, read, change, message):
    with pytest.raises(InvalidValue, match=message):
        read(LLAMA_3_8B | change)


@pytest.mark.parametrize(
    "content,message",
    [
        ("", "is not JSON"),
        (json.dumps(GPT2)[:-20], "is not JSON .*; it may be truncated: fetch it again"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"a":' * 100_000, "is nested too deeply"),
        ('{"model_type": "bert", "a": ' + "[" * 100 + "]" * 100 + "}", "is nested deeper than 32 levels"),
        ('{"model_type": "gpt2", "n_layer": NaN}', "NaN is no JSON number; replace it"),
        ('{"model_type": "gpt2", "n_layer": -Infinity}', "-Infinity is no JSON number"),
        ('{"model_type": "gpt2", "n_layer": 1e999}', "'1e999' overflows a float"),
        ('{"model_type": "gpt2", "n_layer": 1' + "0" * 5000 + "}", "thousands of digits"),
        ('{"model_type": "gpt2", "n_layer": 1, "n_layer": 2}', "key 'n_layer' occurs twice"),
        ('{"model_type": "gpt2", "x": {"y": 1, "y": 2}}', "key 'y' occurs twice"),
        ("[]", "holds an array where an object is needed"),
        ("null", "holds null where an object is needed"),
        ('"gpt2"', "holds a string where an object is needed"),
        ("17", "holds a number where an object is needed"),
        ("{}", "names neither model_type nor architectures"),
        (b'{"model_type": "gpt\xff2"}', r"is not UTF-8 text \(byte 19\)"),
        (json.dumps(GPT2).encode("utf-16"), "is not UTF-8 text"),
        (b"\x80\x04K\x01.", "is not UTF-8 text"),
        (b"\0" * 100, "is not JSON"),
        (b" " * (2 * 1024**2 + 1), "is larger than 2097152 bytes"),
    ],
)
def test_a_broken_file_is_refused_with_the_reason(read, tmp_path, content, message):
    with pytest.raises(InvalidValue, match=message) as raised:
        read(content)
    assert str(raised.value).startswith(str(tmp_path / "config.json")[:80])


def test_a_missing_file_and_an_empty_folder_are_refused(tmp_path):
    for path in (tmp_path / "no.json", tmp_path, tmp_path / "config.json" / "deeper.json"):
        with pytest.raises(InvalidValue, match="no such file; give the path of"):
            model_from_config(path)


def test_a_folder_named_config_json_is_refused(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(InvalidValue, match=r"is not a regular file|cannot be opened"):
        model_from_config(tmp_path)


def test_pipes_devices_and_sockets_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        for path in (tmp_path / "pipe", tmp_path / "s", "/dev/zero", "/dev/null"):
            with pytest.raises(InvalidValue, match=r"is not a regular file|cannot be opened"):
                model_from_config(path)


def test_a_loop_of_links_is_refused(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(InvalidValue, match=r"cannot be (opened|looked up)"):
        model_from_config(tmp_path / "a")


@pytest.mark.parametrize("path", [None, 3, b"config.json", "a\0b.json", "x" * 100_000])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(InvalidValue, match=r"path=|cannot be opened"):
        model_from_config(path)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_value_of_any_key_escapes_as_another_error(tmp_path_factory, data):
    others = ("mistral", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt_neox", "opt", "starcoder2")
    base = data.draw(st.sampled_from([GPT2, LLAMA_3_8B, *({"model_type": kind} for kind in others)]))
    keys = [*base, *LLAMA_3_8B, "rope_parameters", "head_dim", "n_inner", "mlp_bias", "sliding_window"]
    keys += ["partial_rotary_factor", "attn_logit_softcapping", "ffn_dim", "hidden_activation"]
    changes = data.draw(st.dictionaries(st.sampled_from(keys), values, max_size=3))
    file = tmp_path_factory.mktemp("any") / "config.json"
    file.write_text(json.dumps(base | changes))
    with contextlib.suppress(MemplanError):
        model_from_config(file)


def test_an_architecture_without_a_family_needs_transformers(read, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnknownName, match=r"'bloom'.*pip install 'memplan\[huggingface\]'"):
        read({"model_type": "bloom"})
    with pytest.raises(UnknownName, match=r"llama architecture 'LlamaForTokenClassification'.*huggingface"):
        read({"model_type": "llama", "architectures": ["LlamaForTokenClassification"]})


TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 100,
}  # fmt: skip

TRACED = [
    ({**TINY, "model_type": "bert"}, "BertForMaskedLM"),
    ({**TINY, "model_type": "bert", "architectures": ["BertForTokenClassification"]}, None),
    ({**TINY, "model_type": "falcon"}, "FalconForCausalLM"),
    ({**TINY, "model_type": "vit", "image_size": 16, "patch_size": 8}, "ViTForImageClassification"),
]


@pytest.mark.parametrize("config,default", TRACED, ids=["bert", "bert-tokens", "falcon", "vit"])
def test_other_architectures_are_traced_from_transformers_code(read, config, default):
    transformers = pytest.importorskip("transformers")
    model = read(config)
    assert isinstance(model, TracedModel)
    assert model.n_layers == 2
    settings = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    module = getattr(transformers, default or config["architectures"][0])(settings)
    assert model.n_parameters == sum(p.numel() for p in module.parameters())


def test_a_setting_that_a_family_has_no_rule_for_is_traced(read):
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64}
    model = read({"model_type": "gpt_neox", "num_hidden_layers": 2, **sizes, "hidden_dropout": 0.1})
    assert isinstance(model, TracedModel)
    assert any("native_dropout" in one.name for r in model.recordings.values() for one in r.buffers)


def test_code_that_a_file_names_is_never_run(read, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: ...\n")
    remote = {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    with pytest.raises(UnknownName, match=r"the code that auto_map names is never run"):
        read({"model_type": "evil", **remote})
    read({**TINY, "model_type": "bert", **remote})
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "change,error,message",
    [
        ({"num_attention_heads": 3}, InvalidValue, r"fails in transformers .* \(BertForMaskedLM: "),
        ({"num_hidden_layers": 10**9}, InvalidValue, "num_hidden_layers=1000000000 is not allowed"),
        ({"vocab_size": 10**30}, InvalidValue, "fails in transformers"),
        ({"hidden_size": "32"}, InvalidValue, "fails in transformers"),
        ({"quantization_config": {"bits": 4}}, InvalidValue, "is not planned by memplan; remove it"),
        ({"architectures": ["BertForNothing"]}, UnknownName, "unknown bert architecture 'BertForNothing'"),
        ({"architectures": ["Trainer"]}, UnknownName, "unknown bert architecture 'Trainer'"),
    ],
    ids=str,
)
def test_what_transformers_cannot_run_is_refused_in_its_words(read, change, error, message):
    pytest.importorskip("transformers")
    with pytest.raises(error, match=message):
        read({**TINY, "model_type": "bert", **change})


FALCON = {**TINY, "model_type": "falcon"}

# 100 tokens of 32, the last norm's 64, and of each block 32 x 64 + 32 x 32 + 2 x 32 x 128 + 64: 25,920
STRANGE = [
    ({**FALCON, "colour": "red", "use_cache": True, "torch_dtype": "float16"}, 25_920),
    ({**FALCON, "num_kv_heads": 7}, 25_920),  # multi-query goes before the number of heads
    ({"model_type": "falcon", "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 100}, None),
    ({**FALCON, "new_decoder_architecture": True, "num_kv_heads": 7}, None),
    ({**TINY, "model_type": "vit", "image_size": 16, "patch_size": 17}, None),
    ({**TINY, "model_type": "vit", "image_size": [16], "patch_size": 8}, None),
    ({**TINY, "model_type": "bert", "max_position_embeddings": 1}, None),
    ({**TINY, "model_type": "bert", "hidden_size": 10**12}, None),
    ({**TINY, "model_type": "bert", "hidden_act": "os.system"}, None),
    ({**TINY, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, None),
]


@pytest.mark.parametrize("config,n_parameters", STRANGE, ids=lambda value: str(value)[:60])
def test_a_config_with_extra_missing_or_contradicting_fields_is_read_or_refused(read, config, n_parameters):
    pytest.importorskip("transformers")
    if n_parameters is not None:
        assert read(config).n_parameters == n_parameters
        return
    with pytest.raises(MemplanError, match=r"config\.json: .*; ") as refusal:
        read(config)
    assert len(str(refusal.value)) < 600


MAMBA_2 = {
    "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 2,
    "num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1, "vocab_size": 128, "chunk_size": 256,
}  # fmt: skip
LFM_2 = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 128,
    "layer_types": ["conv", "full_attention"],
}  # fmt: skip


@pytest.mark.slow
def test_a_hybrid_whose_scan_follows_no_rule_of_the_length_is_refused_with_its_reason(read):
    """It was answered for 1,024 tokens with the scan's tensors of 256, as 48, 80 and 112 have them."""
    pytest.importorskip("transformers")
    with pytest.raises(MissingRule, match=r"mamba_ssm and causal_conv1d are not installed.*executed=True"):
        read(MAMBA_2)


OLMO_3 = {
    **TINY, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": 128,
    "max_position_embeddings": 1024, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seq_len, lengths", [(112, (0, 127)), (128, (128, 0)), (160, (128, 0))])
def test_masks_of_a_window_are_there_for_sequences_that_reach_it(read, seq_len, lengths):
    """The expected bytes come from tracing the same module with inputs of exactly `seq_len` tokens."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    plan = {"cluster": "8xh100-sxm", "zero": 3, "micro_batch": 2, "seq_len": seq_len}
    found = memplan.estimate(read(OLMO_3), **plan)
    settings = transformers.Olmo3Config.from_dict({**OLMO_3, "use_cache": False})
    ids = torch.zeros(2, seq_len, dtype=torch.int64)
    module = transformers.Olmo3ForCausalLM(settings)
    own = memplan.trace(module, {"input_ids": ids, "labels": ids.clone()}, precisions=["bf16-mixed"])
    assert isinstance(found.model, TracedModel)
    assert found.model.lengths == lengths
    assert found.worst.peak_bytes == memplan.estimate(own, **plan).worst.peak_bytes
    if lengths[0]:
        with pytest.raises(MissingRule, match=r"seq_len=100: .* for sequences of 128 or more tokens"):
            found.model.recording(weights="bfloat16", autocast="", recompute="none", batch=2, seq_len=100)


@pytest.mark.parametrize(
    "config, message",
    [
        (
            {"model_type": "detr", "architectures": ["DetrForObjectDetection"]},
            "DetrForObjectDetection is called with; trace the module itself",
        ),
        (
            {"model_type": "beit", "architectures": ["BeitForMaskedImageModeling"]},
            "is called with; name BeitForImageClassification or .* in architectures, or trace the",
        ),
        (
            {"model_type": "canine", "architectures": ["CanineForSequenceClassification"]},
            r"no attribute 'vocab_size'\); trace the module itself",
        ),
    ],
    ids=["detr", "beit", "canine"],
)
def test_a_class_whose_inputs_are_not_known_is_refused_as_that(read, config, message):
    pytest.importorskip("transformers")
    with pytest.raises(MissingRule, match=f"a config.json does not say what .*{message}"):
        read(config)


@pytest.mark.slow
def test_kernels_that_are_not_installed_are_named(read, capfd):
    pytest.importorskip("transformers")
    model = read(LFM_2)
    assert model.lacks == ("causal_conv1d",)
    notes = memplan.estimate(model, seq_len=1024).notes
    assert any("was traced without causal_conv1d" in note for note in notes)
    assert "falling back" not in capfd.readouterr().err
    assert [n for _, n in model.layers] == [1, 1]
