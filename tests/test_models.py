"""Models: published parameter counts, equal to the torch modules; presets and names."""

import datetime

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memplan
from memplan.errors import InvalidValue, UnknownName
from memplan.models import Decoder, preset, preset_names, resolve
from memplan.models.families import FAMILIES
from memplan.models.gpt import Gpt
from memplan.models.llama import Llama
from memplan.models.presets import model_of_entry, preset_source, preset_table
from validate.cases import OWN, runnable
from validate.systems.torch.modules import Transformer

# The real checkpoints' counts (sums over the tensors of the published weights, tied tensors once).
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
}


def torch_parameter_count(model: Decoder) -> int:
    with torch.device("meta"):
        module = Transformer(model, range(model.n_layers), seq_len=8)
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_equal_the_published_checkpoint(name):
    assert memplan.parameter_count(preset(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", [name for name in preset_names() if preset_table()[name]["family"] in OWN])
def test_parameters_equal_the_torch_module(name):
    assert memplan.parameter_count(preset(name)) == torch_parameter_count(runnable(name))


def test_gpt3_has_the_papers_175_billion_within_its_rounding():
    # Brown et al. 2020, Table 2.1: "175.0B"; the shape itself gives 174.6 billion.
    assert memplan.parameter_count(preset("gpt3-175b")) == 174_604_259_328


def test_670b_is_670_billion_and_divides_well():
    model = runnable("llama-670b")
    assert memplan.parameter_count(model) == pytest.approx(670e9, rel=0.005)
    assert all(size % 16 == 0 for size in (model.n_heads, model.n_kv_heads, model.d_ff, model.n_layers))


@settings(max_examples=25, deadline=None)
@given(
    n_layers=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (6, 3), (4, 4)]),
    d_head=st.sampled_from([2, 4, 10]),
    d_ff=st.integers(1, 50),
    vocab_size=st.integers(1, 100),
    tied_head=st.booleans(),
    attention_bias=st.booleans(),
    mlp_bias=st.booleans(),
)
def test_any_llama_has_the_parameters_of_its_torch_module(n_layers, heads, d_head, **rest):
    n_heads, n_kv_heads = heads
    sizes = {"n_layers": n_layers, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "d_head": d_head}
    model = Llama(name="any", d_model=12, max_seq_len=8, **sizes, **rest)
    assert memplan.parameter_count(model) == torch_parameter_count(model)


@settings(max_examples=25, deadline=None)
@given(
    n_layers=st.integers(1, 3),
    n_heads=st.sampled_from([1, 2, 3, 6]),
    d_ff=st.integers(1, 50),
    vocab_size=st.integers(1, 100),
    max_seq_len=st.integers(1, 50),
    tied_head=st.booleans(),
)
def test_any_gpt_has_the_parameters_of_its_torch_module(**sizes):
    model = Gpt(name="any", d_model=12, **sizes)
    assert memplan.parameter_count(model) == torch_parameter_count(model)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_a_source_and_a_date(name):
    entry = preset_table()[name]
    assert len(entry["source"]) > 20
    assert preset_source(name) == entry["source"]
    assert isinstance(entry["retrieved"], datetime.date)
    assert entry["family"] in FAMILIES.own or "trace" in entry


def test_an_unknown_preset_is_refused_with_the_nearest_name():
    with pytest.raises(UnknownName, match=r"unknown model 'lama3-70b'; did you mean 'llama-3-70b'\?"):
        preset("lama3-70b")
    with pytest.raises(UnknownName, match="did you mean 'gpt2'"):
        preset_source("gtp2")


def test_a_preset_of_an_unknown_family_is_refused_with_the_nearest_family():
    entry = {**preset_table()["llama-2-7b"], "family": "lama"}
    with pytest.raises(UnknownName, match=r"family of the model mine: 'lama'; did you mean 'llama'\?"):
        model_of_entry("mine", entry)


def test_resolve_takes_a_model_a_name_or_a_path(tmp_path):
    model = preset("gpt2")
    assert resolve(model) is model
    assert resolve("gpt2") == model
    file = tmp_path / "tiny" / "config.json"
    file.parent.mkdir()
    file.write_text('{"model_type": "gpt2", "n_layer": 3}')
    for path in (file, str(file), file.parent, str(file.parent)):
        assert (resolve(path).n_blocks, resolve(path).name) == (3, "tiny")


@pytest.mark.parametrize("value", ["", "nonsense", "\0", "x" * 10_000])
def test_resolve_refuses_a_name_that_is_neither_preset_nor_path(value):
    with pytest.raises(UnknownName, match="unknown model"):
        resolve(value)


@pytest.mark.parametrize("value", [None, 7, b"gpt2", ["gpt2"]])
def test_resolve_refuses_what_names_no_model(value):
    with pytest.raises(InvalidValue, match="is not a model; use a preset's name"):
        resolve(value)
