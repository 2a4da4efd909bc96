"""Families of transformers' decoders: parameter counts of published models, and bytes of its own modules."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memplan import MissingRule, estimate, parameter_count
from memplan.engines.options import plan_dict, plan_of
from memplan.errors import InvalidValue, MemplanError
from memplan.estimate import rank_estimate
from memplan.hardware import gpu
from memplan.kernels import cudnn_scratch, efficient_attention_bytes
from memplan.models import Decoder, model_from_config, preset, preset_names, preset_source
from memplan.models.config import Config
from memplan.models.config_of import config_of
from memplan.models.families import FAMILIES
from memplan.models.gemma3 import Gemma3
from memplan.models.mistral import Mistral
from memplan.ops import attention_kernel
from memplan.shapes import BF16, FP32
from validate.cases import OF_TRANSFORMERS, OWN, Case
from validate.records import read_records
from validate.suites.families import QUIRKS, SIZES
from validate.systems.torch.wild import LANGUAGE

DATA = Path(__file__).parents[1] / "data"
PUBLISHED: list[dict[str, Any]] = [
    json.loads(line) for line in (DATA / "published" / "configs.jsonl").read_text().splitlines()
]
"""Published models: values of their config.json, and the parameters of transformers' own model of them."""

READERS = {kind: one for name in FAMILIES.own for kind, one in FAMILIES.named(name).readers.items()}
OF_FAMILIES = [row for row in PUBLISHED if row["config"]["model_type"] in READERS]


def test_most_published_models_are_of_a_family():
    assert len(OF_FAMILIES) >= 60
    assert {row["config"]["model_type"] for row in OF_FAMILIES} == set(READERS)


@pytest.mark.parametrize("row", OF_FAMILIES, ids=lambda row: row["model"])
def test_a_published_model_has_as_many_parameters_as_transformers_gives_it(row, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(row["config"]))
    assert parameter_count(model_from_config(file)) == row["parameters"]


CONFIGURED = [name for name in preset_names() if preset_source(name).startswith("config.json of ")]


@pytest.mark.parametrize("name", [name for name in CONFIGURED if preset(name).family not in OWN])
def test_a_preset_of_a_family_is_the_published_model(name, tmp_path):
    source = preset_source(name).removeprefix("config.json of ").partition(";")[0]
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps(next(row for row in PUBLISHED if row["model"] == source)["config"]))
    assert preset(name) == model_from_config(file)
    assert estimate(name, seq_len=256).to_dict()["model"]["implementation"] == "huggingface"


@pytest.mark.parametrize("size", ["4b", "12b", "27b"])
def test_the_text_model_of_gemma_3_is_the_published_one(size, tmp_path):
    """Table 1 of the report: 3,209, 10,759 and 25,600 million weights beside the table of tokens."""
    file, source = tmp_path / f"gemma-3-{size}-text.json", f"google/gemma-3-{size}-pt (text_config)"
    row = next(row for row in PUBLISHED if row["model"] == source)
    file.write_text(json.dumps(row["config"]))
    model = preset(f"gemma-3-{size}-text")
    assert model == model_from_config(file)
    millions = {"4b": 3_209, "12b": 10_759, "27b": 25_600}[size]
    assert isinstance(model, Gemma3)
    assert round((parameter_count(model) - model.vocab_size * model.d_model) / 1e6) == millions


def test_palm_has_the_parameters_of_its_paper():
    """Table 1 says 540.35 billion; by hand: projections, SwiGLU and norm of each block, table, last norm."""
    block = 2 * 18432 * 48 * 256 + 2 * 18432 * 256 + 3 * 18432 * 73728 + 18432
    assert parameter_count(preset("palm-540b")) == 118 * block + 256000 * 18432 + 18432 == 540_356_474_880
    assert estimate("palm-540b", seq_len=256).to_dict()["model"]["implementation"] == "huggingface"


@pytest.mark.slow
@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["model"])
def test_transformers_gives_a_published_model_these_parameters(row):
    transformers = pytest.importorskip("transformers")
    import torch

    config = transformers.CONFIG_MAPPING[row["config"]["model_type"]].from_dict(row["config"])
    with torch.device("meta"):
        module = getattr(transformers, row["config"]["architectures"][0])._from_config(config)
    assert sum(p.numel() for p in module.parameters()) == row["parameters"]


LARGEST_DIFFERENCE = {"gpt2": 96, "opt": 32, "gemma2": 370, "cohere": 8}
"""Bytes of scalars, which rules leave out: powers of GPT-2's GELU, scales, caps; else at most 2."""

KINDS = {name: {"gemma3": "gemma3_text"}.get(name, name.replace("-", "_")) for name in LANGUAGE}
WILD = [
    record
    for record in read_records(DATA / "measurements" / "wild.jsonl")
    if KINDS.get(record.case["model"]["name"].removeprefix("hf-")) in READERS
]
PIPELINES = [record for record in WILD if record.case["plan"]["pp"] > 1]


@pytest.mark.parametrize("record", PIPELINES, ids=lambda record: record.case["name"])
def test_a_stage_of_a_family_holds_what_one_of_transformers_own_module_does(record):
    """There ids and labels are one tensor on every rank; a family counts two, ids on the first stage only."""
    case = Case.from_dict(record.case)
    name = case.model.name.removeprefix("hf-")
    sizes = LANGUAGE[name][2] | {"tie_word_embeddings": False}
    model = READERS[KINDS[name]].read(Config(sizes), case.model.name)
    ids_bytes = 8 * case.plan.global_batch // case.plan.n_replicas * case.plan.seq_len
    for measured in record.measured["ranks"]:
        at = case.plan.place(measured["rank"])
        first = 0 in case.plan.stages_of(at.pp)
        said = rank_estimate(model, case.plan, at, case.kernels, case.talks_by)
        assert said.states.weights_bytes == measured["weights_bytes"]
        off = measured["peak_bytes"] - (said.peak_bytes - ids_bytes * first)
        assert abs(off) <= 1e-4 * measured["peak_bytes"]


def test_split_passes_of_blocks_that_return_views_are_refused():
    model = OF_TRANSFORMERS["huggingface-opt"](**{**SIZES, "name": "m", "n_kv_heads": 4})
    with pytest.raises(MemplanError, match="blocks return views"):
        estimate(model, pp=2, virtual_stages=2, schedule="zero-bubble", seq_len=64, device="cpu")


ALONE = [record for record in WILD if record.case["plan"]["pp"] == 1]


@pytest.mark.parametrize("record", ALONE, ids=lambda record: record.case["name"])
def test_a_family_holds_what_transformers_own_module_was_measured_to_hold(record):
    """The suite `wild` gives ids and labels as one tensor; a family counts two."""
    case = Case.from_dict(record.case)
    name = case.model.name.removeprefix("hf-")
    model = READERS[KINDS[name]].read(Config(LANGUAGE[name][2]), case.model.name)
    if case.plan.fsdp and not case.model.n_blocks:
        case = replace(case, plan=plan_of(**{**plan_dict(case.plan), "fsdp_units": "model"}))
    ids_bytes = 8 * case.plan.global_batch // case.plan.n_replicas * case.plan.seq_len
    measured = record.measured["ranks"][0]
    said = rank_estimate(model, case.plan, case.plan.place(0), case.kernels, case.talks_by)
    for kind in ("weights_bytes", "grads_bytes", "optimizer_bytes"):
        assert getattr(said.states, kind) == measured[kind]
    off = measured["peak_bytes"] - (said.peak_bytes - ids_bytes)
    assert 0 <= off <= LARGEST_DIFFERENCE.get(name, 2)


@pytest.mark.parametrize("name", QUIRKS)
def test_a_config_is_read_as_it_is_written(name):
    cls: type[Decoder] = OF_TRANSFORMERS[f"huggingface-{name}"]
    model = cls(**{**SIZES, "name": "m", **QUIRKS[name]})
    config = config_of(model)
    assert READERS[config["model_type"]].read(Config(config), "m") == model


def test_a_window_is_a_mask_where_the_sequence_reaches_beyond_it():
    model = Mistral(**{**SIZES, "name": "m", "window": 32})
    plan: dict[str, Any] = {"device": "cpu", "precision": "fp32", "micro_batch": 16}
    within, beyond = (estimate(model, seq_len=n, **plan) for n in (31, 32))
    assert not any("mask" in one.name for one in within.worst.alive)
    assert any("mask" in one.name for one in beyond.worst.alive)


@pytest.mark.parametrize(
    "name,precision,d_head,kernel",
    [
        ("h100-sxm", "bf16", 128, "cudnn"),
        ("h100-sxm", "fp32", 128, "efficient"),
        ("a100-80-sxm", "bf16", 128, "efficient"),
        ("b200", "bf16", 256, "efficient"),
        ("v100-32", "bf16", 128, "math"),
        ("a100-80-sxm", "bf16", 20, "math"),
    ],
)
def test_a_mask_is_taken_by_the_kernels_that_pytorch_chooses_for_masks(name, precision, d_head, kernel):
    dtype = {"bf16": BF16, "fp32": FP32}[precision]
    found = attention_kernel(
        gpu(name).device, (2, 13), dtype, d_head, grouped=False, dropout=False, masked=True
    )
    assert found == kernel
    model = Mistral(**{**SIZES, "name": "m", "window": 32, "d_head": d_head})
    plan: dict[str, Any] = {"cluster": f"1x{name}", "precision": precision, "seq_len": 36}
    if kernel != "math":
        assert estimate(model, **plan).peak.total_bytes > 0
        return
    with pytest.raises(MissingRule, match=r"seq_len=36 reaches beyond the window"):
        estimate(model, **plan)


@pytest.mark.parametrize(
    "name,release,d_head,kernel",
    [
        ("h100-sxm", (2, 13), 192, "cudnn"),
        ("h100-sxm", (2, 14), 192, "flash"),
        ("h100-sxm", (2, 14), 256, "cudnn"),
        ("b200", (2, 13), 256, "flash"),
        ("b200", (2, 14), 192, "flash"),
        ("b200", (2, 14), 256, "cudnn"),
    ],
)
def test_wide_heads_are_cudnn_s_where_the_release_of_pytorch_gives_them_to_it(name, release, d_head, kernel):
    """As PyTorch's CUDA builds chose, without a GPU."""
    device = gpu(name).device
    assert attention_kernel(device, release, BF16, d_head, grouped=False, dropout=False) == kernel


@pytest.mark.parametrize(
    "name,release,queries,keys,dropout,forward_bytes,backward_bytes",
    [
        ("h100-sxm", (2, 13), (2, 128, 8, 64), (2, 128, 8, 64), False, 256, 532736),
        ("h200", (2, 13), (2, 513, 8, 128), (2, 513, 2, 128), False, 256, 8438080),
        ("h100-sxm", (2, 13), (3, 5, 6, 8), (3, 5, 1, 8), False, 256, 6568),
        ("b200", (2, 13), (3, 5, 6, 8), (3, 5, 1, 8), False, 0, 11048),
        ("b200", (2, 13), (2, 128, 8, 64), (2, 128, 8, 64), False, 0, 1056896),
        ("b200", (2, 13), (2, 512, 8, 128), (2, 512, 8, 128), False, 0, 4227072),
        ("b200", (2, 13), (2, 513, 8, 128), (2, 513, 2, 128), False, 0, 8437952),
        ("b200", (2, 11), (2, 5, 8, 64), (2, 300, 8, 64), False, 0, 53696),
        ("b200", (2, 15), (2, 5, 8, 64), (2, 300, 8, 64), False, 0, 20800),
        ("b200", (2, 11), (2, 129, 8, 64), (2, 129, 2, 64), True, 131200, 1196224),
        ("b200", (2, 15), (2, 129, 8, 256), (2, 129, 8, 256), False, 0, 8256),
        ("b200", (2, 15), (2, 100, 8, 256), (2, 300, 2, 256), False, 0, 14752128),
    ],
)
def test_cudnn_s_attention_needs_the_workspaces_that_its_plans_say(
    name, release, queries, keys, dropout, forward_bytes, backward_bytes
):
    """(batch, length, heads, width): what PyTorch's CUDA builds asked their allocator for, without a GPU."""
    found = cudnn_scratch(gpu(name).device, release, queries, keys, BF16, dropout=dropout)
    assert found == (forward_bytes, backward_bytes)


@pytest.mark.parametrize(
    "name,itemsize,seq_len,d_head,n_bytes",
    [
        ("v100-32", 2, 130, 256, 5243904),
        ("v100-32", 2, 72, 128, 524544),
        ("a100-80-sxm", 2, 72, 128, 524416),
        ("a100-80-sxm", 2, 130, 160, 4719360),
        ("a100-80-sxm", 4, 130, 96, 1049088),
        ("a10", 2, 72, 128, 1573376),
        ("a10", 2, 130, 96, 1049088),
        ("rtx-4090", 4, 130, 256, 1574400),
    ],
)
def test_gradients_of_masked_attention_are_summed_in_these_bytes(name, itemsize, seq_len, d_head, n_bytes):
    """Of 8 heads: what PyTorch 2.13's CUDA build asked its allocator for, without a GPU."""
    one_head = efficient_attention_bytes(gpu(name).device, itemsize, seq_len, d_head, seq_len)
    assert 8 * one_head == n_bytes


def test_gradients_of_other_keys_than_queries_are_summed_where_they_do_not_stay_in_registers():
    """By kernel_backward.h: of float32 in no memory; of narrow wide heads in blocks of 64 keys (A100)."""
    a100 = gpu("a100-80-sxm").device
    assert {efficient_attention_bytes(a100, 4, 130, 96, n) for n in (130, 77, 1)} == {1049088 // 8}
    of_queries = 2 * 3 * (4 * 128 * 64 + 16)
    in_bf16 = [efficient_attention_bytes(a100, 2, 130, 160, n) for n in (130, 128, 64)]
    assert in_bf16 == [of_queries + 2 * 4 * n * 256 for n in (192, 128, 64)]


@pytest.mark.parametrize(
    "kind,change,message",
    [
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True is not planned by memplan"),
        (
            "gemma",
            {"hidden_act": "relu"},
            "hidden_act='relu' is not allowed; memplan knows gelu",
        ),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop=0.1 is not planned"),
        ("phi3", {"partial_rotary_factor": 0}, "partial_rotary_factor=0 is not allowed"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": "1"}}, "partial_rotary_factor='1' is not"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False is not planned .*; use True"),
        ("opt", {"word_embed_proj_dim": 512}, "word_embed_proj_dim=512 is not planned by memplan; use 768"),
        ("mistral", {"sliding_window": -1}, "sliding_window=-1 is not allowed"),
        ("mistral", {"num_key_value_heads": 3}, "n_kv_heads=3 does not divide n_heads=32"),
        ("gpt_neox", {"hidden_dropout": 0.1}, "hidden_dropout=0.1 is not planned"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern=0 is not allowed"),
    ],
)
def test_what_a_family_has_no_rule_for_is_refused_by_name(kind, change, message):
    with pytest.raises(InvalidValue, match=message):
        READERS[kind].read(Config(change), "m")
