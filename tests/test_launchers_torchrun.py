"""`--to torchrun`: each script is run on CPU ranks, and its peak compared with the estimate."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

from memplan import Gpt, Llama, Model, PlanRefused, UnknownName, estimate
from memplan.device import CPU
from memplan.estimate import rank_estimate
from memplan.models import implemented, resolve
from memplan.models.gpt_neox import GptNeox

REFERENCE = Llama(
    name="tiny", n_layers=4, d_model=64, n_heads=4, n_kv_heads=2, d_ff=176, vocab_size=1000, max_seq_len=64
)
LLAMA = implemented(REFERENCE, "huggingface")
GPT_UNTIED = Gpt(
    name="tiny-gpt", n_layers=4, d_model=64, n_heads=4, d_ff=256, vocab_size=1000, max_seq_len=64
)
GPT = implemented(replace(GPT_UNTIED, tied_head=True), "huggingface")

NEOX = GptNeox(name="tiny-neox", n_layers=4, d_model=64, n_heads=4, d_ff=256, vocab_size=1000, max_seq_len=64)

SCALARS_BYTES = 128
"""Single numbers, which no rule counts: up to 96 bytes of some 3 MB here.

GPT-2's activation multiplies by three Python numbers, which autograd keeps in 8 bytes each, in each block.
Gloo divides by a number of 8 bytes and its copy of 4; a chunk's loss, a norm and Adam's step take 4 to 8.
"""

TWO: dict[str, Any] = {"seq_len": 64, "device": "cpu"}
FSDP: dict[str, Any] = {**TWO, "dp": 2, "zero": 3}
PLANS: dict[int, dict[str, tuple[Model, dict[str, Any]]]] = {
    2: {
        "ddp": (LLAMA, {**TWO, "dp": 2, "global_batch": 8, "clip_grad_norm": 1.0, "bucket_cap_bytes": 2**20}),
        "zero-1": (LLAMA, {**TWO, "dp": 2, "zero": 1, "precision": "fp32", "gradient_as_bucket_view": True}),
        "zero-2": (LLAMA, {**FSDP, "zero": 2, "global_batch": 8, "clip_grad_norm": 1.0}),
        "zero-3 of whole gradients": (LLAMA, {**FSDP, "global_batch": 6, "no_sync": True}),
        "zero-3": (LLAMA, {**FSDP, "recompute": "full", "optimizer": "sgd-momentum"}),
        "zero-3 with ends": (
            LLAMA,
            {
                **FSDP,
                "fsdp_units": "block+ends",
                "precision": "bf16",
                "recompute": "full",
                "recompute_blocks": 2,
            },
        ),
        "zero-3 on the host": (LLAMA, {**FSDP, "fsdp_blocks": 2, "offload": True, "precision": "fp32"}),
        "zero-3 tied": (GPT, {**FSDP, "set_to_none": False, "optimizer_impl": "foreach"}),
        "pipeline": (LLAMA, {**TWO, "pp": 2, "global_batch": 4, "clip_grad_norm": 1.0, "recompute": "full"}),
        "pipeline of GPT-NeoX": (NEOX, {**TWO, "pp": 2, "global_batch": 4, "precision": "fp32"}),
        "torchtitan": (
            implemented(REFERENCE, "torchtitan"),
            {**FSDP, "recompute": "selective", "loss_chunks": 4, "set_to_none": False},
        ),
    },
    4: {
        "hsdp": (LLAMA, {**FSDP, "dp_replicate": 2, "optimizer": "adam", "optimizer_impl": "foreach"}),
        "pipeline of shards": (
            LLAMA,
            {
                **FSDP,
                "pp": 2,
                "zero": 2,
                "global_batch": 8,
                "schedule": "interleaved-1f1b",
                "virtual_stages": 2,
            },
        ),
        "tensors and shards": (REFERENCE, {**FSDP, "tp": 2, "clip_grad_norm": 1.0}),
        "tensors of transformers and shards": (
            LLAMA,
            {**FSDP, "tp": 2, "clip_grad_norm": 1.0, "recompute": "full", "fsdp_units": "block+ends"},
        ),
        "tied tensors of transformers": (
            implemented(replace(REFERENCE, tied_head=True), "huggingface"),
            {**FSDP, "tp": 2, "zero": 2},
        ),
        "tensors and sequence": (
            GPT_UNTIED,
            {**FSDP, "tp": 2, "zero": 0, "sequence_parallel": True, "recompute": "selective"},
        ),
        "tensors in a pipeline": (
            REFERENCE,
            {**TWO, "tp": 2, "pp": 2, "global_batch": 4, "clip_grad_norm": 1.0},
        ),
    },
}
"""Plans by the number of their ranks."""


@cache
def peaks(n_ranks, folder):
    """What each rank measured of each plan's script."""
    pytest.importorskip("transformers")
    scripts = [folder / f"plan_{n_ranks}_{i}.py" for i in range(len(PLANS[n_ranks]))]
    for script, (model, plan) in zip(scripts, PLANS[n_ranks].values(), strict=True):
        script.write_text(estimate(model, **plan).export("torchrun"))
    (folder / "scripts.json").write_text(json.dumps(list(map(str, scripts))))
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_ranks)]
    harness = Path(__file__).with_name("launched.py")
    ended = subprocess.run([*run, harness, folder / "scripts.json"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-5000:]
    return {
        name: [json.loads(script.with_suffix(f".{rank}.json").read_text()) for rank in range(n_ranks)]
        for name, script in zip(PLANS[n_ranks], scripts, strict=True)
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("scripts")


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks,name", [(n, name) for n, plans in PLANS.items() for name in plans])
def test_a_script_takes_the_bytes_of_the_estimate(folder, n_ranks, name):
    model, keywords = PLANS[n_ranks][name]
    plan, found = estimate(model, **keywords).plan, peaks(n_ranks, folder)[name]
    assert plan.world_size == n_ranks
    predicted = [rank_estimate(model, plan, plan.place(rank), CPU).peak_bytes for rank in range(n_ranks)]
    for rank, predicted_bytes in zip(found, predicted, strict=True):
        assert abs(rank["peak_bytes"] - predicted_bytes) <= SCALARS_BYTES
        assert all(isfinite(loss) for loss in rank["losses"])


@pytest.mark.slow
def test_the_command_in_a_script_starts_it(tmp_path):
    pytest.importorskip("transformers")
    text = estimate(LLAMA, **TWO, dp=2, zero=3, fsdp_units="block+ends", recompute="full").export("torchrun")
    command = next(line.split() for line in text.splitlines() if line.startswith("    torchrun "))
    (tmp_path / command[-1]).write_text(text)
    run = [sys.executable, "-m", "torch.distributed.run", *command[1:]]
    ended = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-5000:]
    assert ended.stdout.count("step 9: loss ") == 2


GPU_PLANS: list[dict[str, Any]] = [
    {"dp": 8, "precision": precision, "zero": zero, "clip_grad_norm": 1.0, "global_batch": 16, **more}
    for precision in ("fp32", "bf16", "bf16-mixed", "fp16-mixed")
    for zero in (0, 1, 2, 3)
    for more in (
        {},
        {"recompute": "selective", "optimizer": "sgd-momentum", "set_to_none": False},
        {"recompute": "full", "recompute_blocks": 2, "optimizer_impl": "for-loop"},
    )
]
OF_DDP: list[dict[str, Any]] = [
    {"dp": 8, "ddp_comm_hook": hook, "static_graph": True} for hook in ("fp16", "bf16", "powersgd")
]
OF_TP: list[dict[str, Any]] = [
    {"tp": 2, "dp": dp, "pp": pp, "zero": zero, "sequence_parallel": sp, "global_batch": 16}
    for sp in (False, True)
    for dp, pp, zero in ((1, 1, 0), (2, 1, 0), (2, 1, 3), (1, 2, 0), (2, 2, 2))
]
OF_PP: list[dict[str, Any]] = [
    {"pp": 2, "virtual_stages": virtual, "schedule": name, "global_batch": 16, "zero": 2, "dp": 2, **more}
    for name, virtual in (
        ("gpipe", 1),
        ("interleaved-1f1b", 2),
        ("looped-bfs", 2),
        ("zero-bubble", 2),
        ("zbv", 2),
    )
    for more in ({}, {"fsdp_units": "block+ends", "clip_grad_norm": 1.0}, {"precision": "fp16-mixed"})
]


def test_a_script_uses_no_name_that_it_lacks_and_imports_none_that_it_does_not_use(tmp_path):
    for name, plans in (
        ("llama-3-8b", [*GPU_PLANS, *OF_DDP, *OF_TP, *OF_PP]),
        ("gpt2", [*GPU_PLANS, *OF_DDP]),
        ("qwen3-8b", [*GPU_PLANS, *OF_PP]),
        ("gemma-2-2b", GPU_PLANS),
    ):
        for implementation in ("huggingface", "reference"):
            model = resolve(name) if name[:2] in ("qw", "ge") else resolve(name, implementation)
            for i, plan in enumerate(plans):
                if model.implementation == "huggingface" and plan.get("tp", 1) > 1:
                    continue
                text = estimate(model, seq_len=512, **plan).export("torchrun")
                (tmp_path / f"{name}_{model.implementation}_{i}.py").write_text(text)
    checks = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F,E9,W", str(tmp_path)]
    ended = subprocess.run(checks, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:]


def test_a_script_says_only_the_sizes_that_are_not_the_defaults():
    text = estimate(REFERENCE, seq_len=64).export("torchrun")
    assert "n_kv_heads=2" in text
    assert "remarks" not in text
    assert "tied_head" not in text


def test_a_script_of_a_plain_plan_is_short():
    planned = estimate("llama-3-8b", implementation="huggingface", cluster="8xh100-sxm", zero=3)
    assert len([line for line in planned.export("torchrun").splitlines() if line]) <= 70


def test_several_nodes_meet_at_one_of_them():
    text = estimate("llama-3-8b", implementation="huggingface", cluster="64xh100-sxm", zero=3).export(
        "torchrun"
    )
    assert (
        "torchrun --nnodes 8 --rdzv-backend c10d --rdzv-endpoint HEAD_NODE:29500 --nproc-per-node 8 " in text
    )


@pytest.mark.parametrize(
    "model,plan,why",
    [
        ("bert-large", {"dp": 2}, "planned from a trace"),
        (GPT, {"pp": 2, "seq_len": 64}, "pp=2"),
        (REFERENCE, {"dp": 2, "tp": 2, "clip_grad_norm": 1.0, "seq_len": 64}, "clip_grad_norm=1 with tp=2"),
        (REFERENCE, {"dp": 2, "engine": "textbook", "seq_len": 64}, "engine='textbook'"),
    ],
)
def test_what_a_script_cannot_say_is_refused_by_name(model, plan, why):
    if model is GPT:
        model = replace(GPT, tied_head=False)
    with pytest.raises(PlanRefused, match=why):
        estimate(model, **plan).export("torchrun")


def test_an_unknown_launcher_is_refused_with_the_known_ones():
    with pytest.raises(UnknownName, match="did you mean 'torchrun'"):
        estimate(REFERENCE).export("torchrn")
