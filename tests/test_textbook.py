"""The textbook engine against the numbers its sources print.

Kind: formula. These rows check theory against theory: that the formulas are copied right, not that they hold.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.engines import textbook
from memplan.errors import InvalidValue

GPT3 = {"seq_len": 2048, "d_model": 12288, "n_heads": 96}
MT_NLG = {"seq_len": 2048, "d_model": 20480, "n_heads": 128}


@pytest.mark.parametrize("zero,printed_gb", [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_figure_1_7_5b_on_64(zero, printed_gb):
    total = textbook.states(7.5e9, zero=zero, dp=64).total_bytes
    assert round(total / 1e9, 1) == printed_gb


# Rajbhandari et al. 2020, Table 1: GB per GPU for stages 1, 2, 3.
ZERO_TABLE_1 = {
    (7.5e9, 1): (120, 120, 120),
    (7.5e9, 4): (52.5, 41.3, 30),
    (7.5e9, 16): (35.6, 21.6, 7.5),
    (7.5e9, 64): (31.4, 16.6, 1.88),
    (7.5e9, 256): (30.4, 15.4, 0.47),
    (7.5e9, 1024): (30.1, 15.1, 0.12),
    (128e9, 1): (2048, 2048, 2048),
    (128e9, 4): (896, 704, 512),
    (128e9, 16): (608, 368, 128),
    (128e9, 64): (536, 284, 32),
    (128e9, 256): (518, 263, 8),
    (128e9, 1024): (513, 257, 2),
    (1e12, 1): (16000, 16000, 16000),
    (1e12, 4): (7000, 5500, 4000),
    (1e12, 16): (4750, 2875, 1000),
    (1e12, 64): (4187, 2218, 250),
    (1e12, 256): (4046, 2054, 62.5),
    (1e12, 1024): (4011, 2013, 15.6),
}


@pytest.mark.parametrize("n_parameters,dp", ZERO_TABLE_1)
def test_zero_table_1(n_parameters, dp):
    for zero, printed_gb in enumerate(ZERO_TABLE_1[n_parameters, dp], start=1):
        total_gb = textbook.states(n_parameters, zero=zero, dp=dp).total_bytes / 1e9
        # The paper sometimes rounds and sometimes truncates: 41.25 is 41.3, but 4011.7 is 4011.
        assert total_gb == pytest.approx(printed_gb, abs=1 if printed_gb > 100 else 0.06)


def test_bytes_per_parameter():
    assert (textbook.MIXED_ADAM.total, textbook.MEGATRON_ADAM.total, textbook.FP32_ADAM.total) == (16, 18, 16)


@pytest.mark.parametrize("dp", [1, 2, 8, 64])
def test_megatrons_distributed_optimizer(dp):
    mixed = textbook.distributed_optimizer_bytes_per_parameter(dp)
    fp32 = textbook.distributed_optimizer_bytes_per_parameter(dp, textbook.FP32_ADAM)
    assert mixed == pytest.approx(6 + 12 / dp)
    assert fp32 == pytest.approx(8 + 8 / dp)


def test_course_notes_7b_in_fp32():
    whole = textbook.states(7e9, per_parameter=textbook.FP32_ADAM)
    parts_gb = [b / 1e9 for b in (whole.weights_bytes, whole.grads_bytes, whole.optimizer_bytes)]
    assert parts_gb == [28, 28, 56]
    assert whole.total_bytes / 1e9 == 112
    shared = textbook.states(7e9, zero=3, dp=4, per_parameter=textbook.FP32_ADAM)
    assert shared.total_bytes / 1e9 == 28


@pytest.mark.parametrize("zero,multiple", [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_data_parallel_traffic(zero, multiple):
    assert textbook.data_parallel_traffic_elements(7.5e9, zero=zero) == multiple * 7.5e9


@pytest.mark.parametrize("model,attention_core,saved_percent", [(GPT3, 80, 70), (MT_NLG, 64, 65)])
def test_korthikanti_section_5_selective_recomputation_saves(model, attention_core, saved_percent):
    # "5as/h = 80 and 64 ... selective activation recomputation saves 70% and 65%" of the activations.
    whole = textbook.layer_activations_bytes(micro_batch=1, **model)
    assert whole == model["seq_len"] * model["d_model"] * (34 + attention_core)
    kept = textbook.layer_activations_tp_sp_selective_bytes(
        seq_len=model["seq_len"], micro_batch=1, d_model=model["d_model"], tp=1
    )
    assert round(100 * (1 - kept / whole)) == saved_percent


layers = st.fixed_dictionaries(
    {
        "seq_len": st.integers(1, 8192),
        "micro_batch": st.integers(1, 16),
        "d_model": st.integers(1, 20480),
        "n_heads": st.integers(1, 128),
    }
)


@given(layers)
def test_on_one_rank_the_divided_formulas_are_the_whole_one(layer):
    whole = textbook.layer_activations_bytes(**layer)
    assert textbook.layer_activations_tp_bytes(**layer, tp=1) == pytest.approx(whole)
    assert textbook.layer_activations_tp_sp_bytes(**layer, tp=1) == pytest.approx(whole)


@given(layers, st.integers(1, 64))
def test_each_further_technique_never_holds_more(layer, tp):
    sizes = {key: layer[key] for key in ("seq_len", "micro_batch", "d_model")}
    tensor = textbook.layer_activations_tp_bytes(**layer, tp=tp)
    sequence = textbook.layer_activations_tp_sp_bytes(**layer, tp=tp)
    selective = textbook.layer_activations_tp_sp_selective_bytes(**sizes, tp=tp)
    assert selective <= sequence <= tensor * (1 + 1e-12)
    assert selective <= textbook.layer_activations_tp_selective_bytes(**sizes, tp=tp) * (1 + 1e-12)
    assert textbook.layer_activations_full_recompute_bytes(**sizes) == pytest.approx(
        textbook.layer_activations_tp_sp_selective_bytes(**sizes, tp=17)
    )


@pytest.mark.parametrize(
    "n_layers,pp,chunks,layers_kept", [(96, 1, 1, 96), (96, 8, 1, 96), (96, 8, 3, 96 * (1 + 7 / 24))]
)
def test_the_first_stage_keeps_as_many_layers_as_the_model_has(n_layers, pp, chunks, layers_kept):
    kept = textbook.first_stage_activations_bytes(
        layer_activations_bytes=1.0, n_layers=n_layers, pp=pp, chunks=chunks
    )
    assert kept == pytest.approx(layers_kept)


@pytest.mark.parametrize("pp", [1, 8])
def test_what_is_kept_outside_the_layers_is_the_papers_fraction_of_sbhl_over_t(pp):
    # Korthikanti et al. 2022, section 4.3: sbhL/t (p/L + [p = 1] 4/L (1 + v/h)).
    s, b, h, v, t, n_layers = 2048, 4, 6144, 51200, 8, 48
    fraction = pp / n_layers + (4 / n_layers * (1 + v / h) if pp == 1 else 0)
    ends = textbook.input_output_activations_bytes(
        seq_len=s, micro_batch=b, d_model=h, vocab_size=v, tp=t, pp=pp
    )
    assert ends == pytest.approx(s * b * h * n_layers / t * fraction)


@given(st.integers(1, 10**12), st.integers(1, 4096))
def test_more_sharding_never_holds_more(n_parameters, dp):
    totals = [textbook.states(n_parameters, zero=zero, dp=dp).total_bytes for zero in range(4)]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("zero", [-1, 4, 1.0, None])
def test_a_stage_that_does_not_exist_is_refused(zero):
    with pytest.raises(InvalidValue, match=r"zero=.* is not allowed; use an integer from 0 to 3"):
        textbook.states(1, zero=zero)
