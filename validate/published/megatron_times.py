"""Published seconds of Megatron's steps beside memplan's: `data/published/megatron_times.csv`."""

import csv
from collections.abc import Iterable
from statistics import median
from typing import Final, NamedTuple
from zlib import crc32

from memplan.estimate import estimate
from memplan.files import file_text
from memplan.launchers.megatron import Arguments
from memplan.text_tables import text_table
from validate.published.order import order_text
from validate.shipped import data_folder

ROWS: Final = data_folder() / "published" / "megatron_times.csv"
"""The rows that come with memplan."""

LARGEST_BYTES: Final = 2**20

ALL_RECOMPUTED: Final = {
    "recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1,
}  # fmt: skip


class Timed(NamedTuple):
    """A row with its source, and the published and the predicted seconds of a step."""

    row_id: str
    source: str
    published_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """predicted / published - 1."""
        return self.predicted_s / self.published_s - 1


def read_rows() -> list[dict[str, str]]:
    """The rows of the file that comes with memplan."""
    text = file_text(ROWS, most_bytes=LARGEST_BYTES, what="file as data/published/megatron_times.csv")
    return list(csv.DictReader(text.splitlines()))


def chose_the_host(row: dict[str, str]) -> bool:
    """Whether a row is one of the third that chose the rate of `memplan/time/host.toml`."""
    return row["row_id"].startswith("vtrain") and crc32(row["row_id"].encode()) % 3 == 0


def kept_back() -> list[dict[str, str]]:
    """The rows that chose no rate."""
    return [row for row in read_rows() if not chose_the_host(row)]


def timed(row: dict[str, str]) -> Timed:
    """A row with its prediction: a GPT in fp16 whose layers are all recomputed, as they ran in 2021 and 2022.

    Assumes: Megatron's local layers, since Transformer Engine was not there yet; the plain schedule.
    """
    arguments = Arguments(
        ALL_RECOMPUTED
        | {
            "num-layers": row["n_layers"],
            "hidden-size": row["hidden_size"],
            "num-attention-heads": row["n_heads"],
            "seq-length": row["seq_len"],
            "max-position-embeddings": row["seq_len"],
            "vocab-size": row["vocab_size"],
            "tensor-model-parallel-size": row["tp"],
            "pipeline-model-parallel-size": row["pp"],
            "micro-batch-size": row["micro_batch"],
            "global-batch-size": row["global_batch"],
            "position-embedding-type": "learned_absolute",
            "transformer-impl": "local",
            "fp16": True,
        },
        {},
    )
    found = estimate(arguments.model, cluster=f"{row['n_gpus']}x{row['gpu']}", **arguments.keywords)
    assert found.step_s is not None  # the rates of A100 are known
    source = row["row_id"].rpartition("-")[0]
    return Timed(row["row_id"], source, float(row["step_s"]), found.step_s)


def table(rows: Iterable[Timed]) -> str:
    """The errors of each source, and whether predicted and published seconds are in one order."""
    by_source: dict[str, list[Timed]] = {}
    for row in rows:
        by_source.setdefault(row.source, []).append(row)
    cells = [("step times that chose no rate", "rows", "median", "largest", "in order")]
    for source, its in by_source.items():
        errors = [abs(row.error) for row in its]
        order = order_text([(row.predicted_s, row.published_s) for row in its])
        cells.append((source, str(len(its)), f"{median(errors):.1%}", f"{max(errors):.1%}", order))
    return text_table(cells, "<>>>>", flexible=[0])
