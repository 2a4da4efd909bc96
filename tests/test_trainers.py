"""transformers' Trainer: its arguments read as a plan, what it adds to a step, what is refused."""

import json
from dataclasses import replace
from typing import Any

import pytest

import memplan
from memplan.errors import InvalidValue, MissingRule, UnknownName
from memplan.launchers import read
from memplan.launchers.training_arguments import AT_DEFAULT, HARMLESS, USUAL
from memplan.models import implemented, preset

LLAMA: Any = implemented(preset("llama-3-8b"), "huggingface")
MODEL = replace(LLAMA, n_layers=2, vocab_size=32_000)
TRAINER: dict[str, Any] = {
    "trainer": "huggingface", "optimizer_impl": "fused", "seq_len": 512, "precision": "bf16",
}  # fmt: skip


def test_every_argument_is_known():
    transformers = pytest.importorskip("transformers")
    own = set(transformers.TrainingArguments.__dataclass_fields__)
    known = {*USUAL, *AT_DEFAULT, *HARMLESS}
    assert own == known
    defaults = transformers.TrainingArguments(output_dir="x", use_cpu=True)
    for name, value in {**USUAL, **AT_DEFAULT}.items():
        found = getattr(defaults, name)
        if name not in ("use_cpu", "optim", "accelerator_config", "fsdp_config", "torch_compile_backend"):
            assert (found or None) == (value or None) or found == value, name
    assert defaults.optim == USUAL["optim"]


def test_a_line_and_a_file_say_the_same(tmp_path):
    file = tmp_path / "training_arguments.json"
    asked = {"bf16": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    file.write_text(json.dumps(asked | {"gradient_checkpointing": True, "weight_decay": 0.1}))
    line = "--bf16 --per_device_train_batch_size=4 --gradient_accumulation_steps 2 --gradient_checkpointing"
    found = read(line, "transformers", MODEL)
    assert found == read(file, "transformers", MODEL)
    assert found.on_ranks(8) == {
        "trainer": "huggingface", "implementation": "huggingface", "micro_batch": 4, "optimizer": "adamw",
        "optimizer_impl": "fused", "clip_grad_norm": 1.0, "precision": "bf16-mixed", "recompute": "full",
        "global_batch": 64,
    }  # fmt: skip


@pytest.mark.parametrize(
    "plan",
    [
        {"dp": 8, "recompute": "full", "clip_grad_norm": 1.0, "precision": "bf16-mixed", "global_batch": 32},
        {"dp": 8, "bucket_cap_bytes": 8 * 2**20, "precision": "fp16-mixed"},
        {"dp": 8, "zero": 3, "fsdp_units": "block+ends", "precision": "bf16-mixed-reduce-bf16"},
        {
            "dp": 8, "zero": 2, "fsdp_units": "block+ends", "precision": "fp32", "recompute": "full",
            "micro_batch": 2, "global_batch": 32,
        },
    ],
)  # fmt: skip
def test_what_is_written_is_read_back(tmp_path, plan):
    estimated = memplan.estimate(MODEL, **{**TRAINER, **plan})
    file = tmp_path / "training_arguments.json"
    file.write_text(estimated.export("transformers"))
    keywords = read(file, "transformers", MODEL).on_ranks(8)
    del keywords["implementation"]
    again = memplan.estimate(MODEL, dp=8, seq_len=512, **keywords)
    assert again.plan == estimated.plan


@pytest.mark.parametrize(
    "line,kind,said",
    [
        ("--per_device_train_batch_sise 2", UnknownName, "did you mean 'per_device_train_batch_size'"),
        ("--optim adamw_torch", InvalidValue, "optim='adamw_torch' has no rule yet; use 'adamw_torch_fused'"),
        ("--torch_compile", InvalidValue, "torch_compile=True has no rule yet; use false"),
        ("--deepspeed ds.json", InvalidValue, "deepspeed='ds.json' has no rule yet"),
        ("--bf16 --fp16", InvalidValue, "At most one of fp16 and bf16"),
        (
            "--gradient_checkpointing --gradient_checkpointing_kwargs '{\"use_reentrant\": true}'",
            InvalidValue,
            "gradient_checkpointing_kwargs=.* has no rule yet",
        ),
        (
            "--fsdp true --fsdp_config '{\"version\": 3}'",
            InvalidValue,
            "version=3 is not allowed; use 1 or 2",
        ),
        (
            '--fsdp true --fsdp_config \'{"version": 1, "reshard_after_forward": "shard_grad_op"}\'',
            InvalidValue,
            "has no effect on FSDP1: Accelerate 1.15 takes FULL_SHARD all the same",
        ),
        ("--fsdp true --fsdp_config '{\"reshards\": 1}'", UnknownName, "key of fsdp_config 'reshards'"),
        ("--bf16 'x", InvalidValue, "close every quote"),
    ],
)
def test_what_has_no_rule_is_refused_by_name(line, kind, said):
    with pytest.raises(kind, match=said):
        read(line, "transformers", MODEL)


@pytest.mark.parametrize(
    "options,said",
    [
        ({"optimizer_impl": "foreach"}, "optimizer_impl='foreach'"),
        ({"dp": 2, "zero": 1}, "zero=1"),
        ({"dp": 2, "zero": 3}, "fsdp_units='block'"),
        ({"dp": 2, "zero": 3, "precision": "bf16-mixed"}, "precision='bf16-mixed'"),
        ({"recompute": "selective"}, "recompute='selective'"),
        ({"dp": 2, "static_graph": True}, "static_graph"),
        ({"tp": 2}, "tp=2"),
        (
            {"zero": 3, "fsdp_units": "block+ends", "liger_kernel": "fused_linear_cross_entropy"},
            "liger_kernel",
        ),
        ({"activation_offloading": "save_on_cpu", "recompute": "full"}, "activation_offloading"),
    ],
)
def test_plans_without_a_rule_are_refused(options, said):
    with pytest.raises(MissingRule, match=f"trainer='huggingface' with .*{said}"):
        memplan.estimate(MODEL, **{**TRAINER, **options})


def test_models_of_other_code_are_refused():
    with pytest.raises(MissingRule, match="calls models of transformers"):
        memplan.estimate("gpt2", implementation="reference", trainer="huggingface", optimizer_impl="fused")


LORA: dict[str, Any] = {"lora_rank": 8, "precision": "bf16-mixed"}
FSDP2: dict[str, Any] = {"dp": 8, "zero": 3, "precision": "bf16-mixed-reduce-bf16"}
TIED: Any = replace(MODEL, tied_head=True)


@pytest.mark.parametrize(
    "model,options,said",
    [
        (TIED, {**LORA, **FSDP2}, "lora_rank=8 of tied ends"),
        (MODEL, {**LORA, **FSDP2, "modules_to_save": "lm_head"}, "adapters or copies of the ends"),
        ("gpt2", {**FSDP2}, "no rotary decoder"),
    ],
)
def test_units_of_fsdp2_without_a_rule_are_refused(model, options, said):
    with pytest.raises(MissingRule, match=said):
        memplan.estimate(model, **{**TRAINER, **options})


def test_what_peft_wraps_is_always_searched_for_unused_parameters():
    found = [
        held(dp=8, recompute="full", **LORA, trainer=name).collectives for name in ("huggingface", "none")
    ]
    trainers, plain = [sum(one.payload_bytes for one in each if one.kind == "all_reduce") for each in found]
    assert trainers - plain == 4 * 2 * 7 * MODEL.n_layers  # two factors of seven linears in each block


def test_a_last_norm_beside_adapters_is_a_unit_of_its_own():
    gathers = sum(
        one.calls
        for one in held(**{**LORA, **FSDP2, "fsdp_units": "block+ends"}).collectives
        if one.what == "gather weights"
    )
    assert gathers == 3 + 2 * MODEL.n_layers + 1  # norm, embedding, head; blocks twice; the embedding twice


def test_fsdp2_accumulates_whole_gradients_unless_each_batch_syncs():
    line = "--bf16 --fsdp true --gradient_accumulation_steps 4"
    each = ' --accelerator_config \'{"gradient_accumulation_kwargs": {"sync_each_batch": true}}\''
    whole, reduced = [
        memplan.estimate(MODEL, dp=8, global_batch=256, **read(text, "transformers", MODEL).keywords)
        for text in (line, line + each)
    ]
    assert whole.allocated_bytes > reduced.allocated_bytes


def test_fsdp1_is_read_with_accelerates_defaults():
    line = "--bf16 --fsdp true --gradient_accumulation_steps 4 --fsdp_config '{\"version\": 1}'"
    keywords = read(line, "transformers", MODEL).keywords
    told = {"zero": 3, "fsdp_version": 1, "use_orig_params": True, "backward_prefetch": "none"}
    assert keywords.items() >= (told | {"no_sync": True, "precision": "bf16-mixed-reduce-bf16"}).items()
    with pytest.raises(MissingRule, match="trainer='huggingface' with zero=2"):
        memplan.estimate(MODEL, dp=2, **{**TRAINER, **told, "zero": 2})


def test_fsdp1_casts_the_modules_buffers():
    told: dict[str, Any] = {"dp": 8, "zero": 3, "fsdp_version": 1, "precision": "bf16-mixed-reduce-bf16"}
    found = {row.name: row.n_bytes for row in held(**told).worst.alive if "inv_freq" in row.name}
    assert found == dict.fromkeys(("rotary_emb.inv_freq", "rotary_emb.original_inv_freq"), 64 * 2)


def test_a_window_is_refused_where_it_needs_a_mask():
    whole: Any = implemented(preset("mistral-7b"), "huggingface")
    mistral = replace(whole, n_layers=2)
    memplan.estimate(replace(mistral, window=1024), **TRAINER)
    with pytest.raises(MissingRule, match="no rule joins it with a mask over 512 tokens"):
        memplan.estimate(replace(mistral, window=256), **TRAINER)


def held(**options: Any) -> memplan.Estimate:
    return memplan.estimate(MODEL, **{**TRAINER, **options})


def test_a_step_holds_a_mask_and_scalars_more():
    more = (
        held(clip_grad_norm=1.0).peak.total_bytes - held(trainer="none", clip_grad_norm=1.0).peak.total_bytes
    )
    mask, scalars = 512 * 8, 5 * 4 - 2  # the norm is in bfloat16
    assert more == mask + scalars


def test_ddp_looks_for_unused_parameters_unless_blocks_are_recomputed():
    def reduced(**options: Any) -> int:
        found = held(dp=8, clip_grad_norm=1.0, **options).collectives
        return sum(one.payload_bytes for one in found if one.kind == "all_reduce")

    n_parameters = 2 * 9 + 3
    assert reduced() - reduced(trainer="none") == 4 * n_parameters
    assert reduced(recompute="full") == reduced(recompute="full", trainer="none")


def test_accelerate_keeps_the_head_gathered():
    usual = {"dp": 8, "zero": 3, "fsdp_units": "block+ends"}

    def gathered(**options: Any) -> int:
        found = held(**usual, **options).collectives
        return sum(one.payload_bytes for one in found if one.what == "gather weights")

    head = MODEL.vocab_size * MODEL.d_model * 2
    assert gathered(trainer="none") - gathered() >= head
    assert held(**usual).peak.total_bytes > held(**usual, trainer="none").peak.total_bytes
