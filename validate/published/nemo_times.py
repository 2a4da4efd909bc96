"""NVIDIA's published rates of NeMo on H100 beside memplan's seconds: `data/published/nemo_times.csv`."""

import csv
from typing import Any, Final

from memplan.estimate import estimate
from memplan.files import file_text
from memplan.launchers.megatron import Arguments
from validate.published.megatron_times import LARGEST_BYTES, Timed
from validate.shipped import data_folder

ROWS: Final = data_folder() / "published" / "nemo_times.csv"
"""The rows that come with memplan."""

LLAMA: Final = {
    "swiglu": True, "disable-bias-linear": True, "normalization": "RMSNorm", "hidden-dropout": 0.0,
    "attention-dropout": 0.0, "position-embedding-type": "rope",
    "untie-embeddings-and-output-weights": True,
}  # fmt: skip
"""What a Llama has and a GPT-3 has not."""


CHOSE_THE_SHARE: Final = frozenset(f"nvidia-nemo24-0{n}" for n in (783, 784, 785, 790))
"""The rows of NeMo 24.05, which chose the share of products in fp8 of `memplan/time/sustained.toml`."""


def read_rows() -> list[dict[str, str]]:
    """The rows of the file that comes with memplan."""
    text = file_text(ROWS, most_bytes=LARGEST_BYTES, what="file as data/published/nemo_times.csv")
    return list(csv.DictReader(text.splitlines()))


def kept_back() -> list[dict[str, str]]:
    """The rows that chose no rate."""
    return [row for row in read_rows() if row["row_id"] not in CHOSE_THE_SHARE]


def timed(row: dict[str, str]) -> Timed:
    """A row with its prediction: a model of NeMo's, whose products are in fp8 with delayed scaling.

    Assumes: NVIDIA's configurations of 2024, which recompute nothing and overlap data-parallel traffic with
    passes, and tensor-parallel traffic with products (`ub_tp_comm_overlap`). Only seconds are meant: NeMo's
    gradients were in bfloat16, which Megatron-Core's main_grad is not.

    Source: NVIDIA/NeMo-Framework-Launcher at 26e42fa91d, launcher_scripts/conf/training.
    """
    numbers = {
        "num-layers": "n_layers", "hidden-size": "hidden_size", "ffn-hidden-size": "ffn_hidden_size",
        "num-attention-heads": "n_heads", "num-query-groups": "n_kv_heads", "seq-length": "seq_len",
        "vocab-size": "vocab_size", "tensor-model-parallel-size": "tp", "pipeline-model-parallel-size": "pp",
        "num-virtual-stages-per-pipeline-rank": "vp", "context-parallel-size": "cp",
        "micro-batch-size": "micro_batch", "global-batch-size": "global_batch",
    }  # fmt: skip
    given: dict[str, Any] = {name: row[column] for name, column in numbers.items()}
    given |= dict.fromkeys(("bf16", "use-distributed-optimizer"), True)
    given |= {"overlap-grad-reduce": True, "overlap-param-gather": True}
    given |= {"fp8-format": "hybrid", "fp8-amax-history-len": 1024}
    given |= dict.fromkeys(("sequence-parallel", "tp-comm-overlap"), row["tp"] != "1")
    given["group-query-attention"] = row["n_kv_heads"] != row["n_heads"]
    arguments = Arguments(given | (LLAMA if row["swiglu"] == "true" else {}), {})
    found = estimate(arguments.model, cluster=f"{row['n_gpus']}x{row['gpu']}", **arguments.keywords)
    tokens = found.plan.global_batch * found.plan.seq_len
    published_s = tokens / (float(row["tokens_per_s_per_gpu"]) * int(row["n_gpus"]))
    assert found.step_s is not None  # the rates of H100 are known
    return Timed(row["row_id"], row["row_id"].rpartition("-")[0], published_s, found.step_s)
