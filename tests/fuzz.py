"""Hostile inputs for every reader: `python -m tests.fuzz` (`make fuzz`) tries 100,000, the tests 5,000.

Each input follows from a seed, the reader's name and a number, so that one that fails is named and can be
made again: `python -m tests.fuzz --only records --first 4711 --inputs 1`. What is claimed: a reader answers,
or raises a `MemplanError`; a command ends with 0, 1 or 2, and with 2 after one line on stderr; and nothing
takes longer than `MOST_S` seconds of processor time, or `MOST_TRACED_S` if it is traced. A command that a
signal interrupts ends by it, without a traceback, and leaves no part of a file.
"""

import csv
import gc
import io
import json
import os
import pickle
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from html.parser import HTMLParser
from math import ceil
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import click
from click.testing import CliRunner

import memplan
from memplan.cli import commands
from memplan.cli.flags import PlanCommand
from memplan.engines.options import USUAL_ENGINE, plan_fields
from memplan.errors import InvalidValue, MemplanError
from memplan.memory import n_bytes_of
from memplan.models import model_from_config
from memplan.models.trace_from_json import model_from_trace
from memplan.models.traced import TracedModel
from memplan.plan import Plan
from memplan.shapes import KINDS
from memplan.tracing import cache as traces
from memplan.tracing.cache import Request
from validate import report
from validate.__main__ import main as validate_commands
from validate.adapted import on_file
from validate.calibrate import read_timings
from validate.cases import Case, trace_file
from validate.explain import explained, snapshot_comparison
from validate.published import memory
from validate.records import Record, read_records
from validate.report import page, tables
from validate.shipped import data_folder
from validate.suites.file import CASE_KEYS, read_suite
from validate.suites.models import SMALL
from validate.where import RECORD_FIELDS, read_where, record_facts

MOST_S: Final = 2.0
"""Processor seconds that no input may take more than, unless it is traced."""

MOST_TRACED_S: Final = 20.0
"""Processor seconds of an input for which a module runs, forward and backward, in every precision."""

HOSTILE_TEXTS: Final = (
    *(
        "",
        " ",
        "x",
        "0",
        "1",
        "nan",
        "=1+1",
        "@SUM(A1)",
        "-2+3",
        "\x00",
        "\x1b[2J",
        "\u202e",
        "a" * 300,
        "b" * 5000,
    ),
    *("é", "模型", "%s%n", "\r\n", "{{ 7 * 7 }}", "../../etc/passwd"),
    *("<script>alert(1)</script>", "\"><img src=x onerror='x'>"),
)

HOSTILE: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 8, 64, 65536, 2**31 - 1, 2**31, 2**53, 2**63, 10**40, -(10**40)),
    *(0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, float("inf"), float("-inf"), float("nan")),
    *HOSTILE_TEXTS,
    *([], [[]], {}, {"": {}}, [None], [0] * 50, {"a": [{"b": [1]}]}, [[1, 2], [3]]),
)
"""Values that somebody did not think of."""


class Failed(AssertionError):
    """An input that a reader did not withstand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A reader, and how its inputs are made: from a random number generator, anew each time.

    `most_s`: the processor seconds that none of its inputs may take more than.
    """

    name: str
    make: Callable[[random.Random], Any]
    read: Callable[[Any], None]
    most_s: float = MOST_S


def any_value(rng: random.Random, depth: int = 2) -> Any:
    """A hostile value, or one made of some."""
    if depth and rng.random() < 0.15:
        if rng.random() < 0.5:
            return [any_value(rng, depth - 1) for _ in range(rng.randrange(4))]
        return {str(any_value(rng, 0))[:20]: any_value(rng, depth - 1) for _ in range(rng.randrange(4))}
    return (
        deepcopy(rng.choice(HOSTILE))
        if rng.random() < 0.8
        else rng.randrange(-(2 ** rng.randrange(1, 70)), 2**40)
    )


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a nest of dicts and lists."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*path, key)
            yield from places(part, (*path, key))


def mutated(rng: random.Random, value: Any) -> Any:
    """A copy with a few things changed, left out, doubled or put in."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        every = list(places(value))
        if not every:
            return any_value(rng)
        *path, last = rng.choice(every)
        owner = value
        for key in path:
            owner = owner[key]
        how = rng.random()
        if how < 0.65:
            owner[last] = any_value(rng)
        elif how < 0.85:
            del owner[last]
        elif isinstance(owner, list):
            owner.insert(rng.randrange(len(owner) + 1), rng.choice((owner[last], any_value(rng))))
        else:
            owner[rng.choice((str(any_value(rng, 0))[:20], f"{last}x"))] = any_value(rng)
    return value


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Bytes with some changed, cut out, doubled or cut off."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(found) + 1)
        how = rng.random()
        if how < 0.4 and at < len(found):
            found[at] = rng.randrange(256)
        elif how < 0.6:
            del found[at : at + rng.randrange(1, 30)]
        elif how < 0.8:
            found[at:at] = rng.choice(
                (b"\0" * 9, b"[" * 3000, b'{"a":' * 2000, b"9" * 5000, b"\xff\xfe", b"\n", b",")
            )
        else:
            del found[at:]
    return bytes(found)


def file_of(data: bytes, suffix: str) -> Path:
    """A file that holds some bytes, in a folder of this process."""
    path = _folder() / f"input{suffix}"
    path.write_bytes(data)
    return path


@cache
def _folder() -> Path:
    return Path(_temporary().name)


@cache
def _temporary() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory()


# Records


@cache
def _record_lines() -> tuple[bytes, ...]:
    lines: list[bytes] = []
    for name in ("quick", "gpu-standin", "refused"):
        lines += (data_folder() / "measurements" / f"{name}.jsonl").read_bytes().splitlines()[:40]
    return tuple(sorted(lines, key=len)[: 3 * len(lines) // 4])


NAMES: Final = (*HOSTILE_TEXTS, "..", "../hf-bert-probe", "/etc/passwd", "traces/hf-bert-probe", "~")
"""Names of traced models, of which none is one."""


def make_records(rng: random.Random) -> bytes:
    """A few lines, one of them not as it was."""
    lines = rng.sample(_record_lines(), 3)
    if rng.random() < 0.75:
        row = json.loads(lines[1])
        if "case" in row and rng.random() < 0.1:
            row["case"]["model"] = {"family": "traced", "name": rng.choice(("hf-bert-probe", *NAMES))}
        changed = json.dumps(mutated(rng, row)).encode()
    else:
        changed = damaged(rng, lines[1])
    return b"\n".join([lines[0], changed, lines[2], b""])


def read_record_file(data: bytes) -> None:
    """Read, listed, as a table and filtered."""
    records = read_records(file_of(data, ".jsonl"))
    table = tables.frame(records)
    text = report.listing(records, tables.rows_of(tables.by_axis(table)))
    _check_text(text)
    for record in records:
        _check_text(report.details(record))
        record.to_json()
        record_facts(record)
    list(csv.reader(io.StringIO(tables.csv_text(table))))


def _check_text(text: str) -> None:
    if not all(c.isprintable() or c == "\n" for c in text):
        raise Failed(f"control characters are printed: {text[:200]!r}")


# Suites


def toml(value: Any) -> str:
    """A value as TOML; None and what TOML has no word for become texts."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {toml(part)}" for key, part in value.items()) + "}"
    return json.dumps(value if isinstance(value, str) else str(value))


TINY: Final = {"family": "llama", "n_layers": 2, "d_model": 32, "n_heads": 4, "d_ff": 64} | dict.fromkeys(
    ("vocab_size", "max_seq_len"), 64
)
SUITE: Final[dict[str, Any]] = {
    "defaults": {"model": "llama-small", "seq_len": 32},
    "case": [
        {"dp": 2, "zero": [0, 3], "precision": ["fp32", "bf16-mixed"]},
        {"name": "uneven", "pp": 2, "layers_per_stage": [[1, 3]], "schedule": ["gpipe"], "steps": 7},
        {"model": TINY, "tp": 2, "sequence_parallel": True, "timeout_s": 9.5},
    ],
}


def make_suite(rng: random.Random) -> bytes:
    """A suite with something changed, or with keys and values at random."""
    suite = mutated(rng, SUITE)
    if rng.random() < 0.3:
        suite = {
            "case": [
                {rng.choice((*CASE_KEYS, *plan_fields())): any_value(rng) for _ in range(rng.randrange(1, 6))}
            ]
        }
    if not isinstance(suite, dict):
        suite = {"case": suite}
    lines = [f"{json.dumps(key)} = {toml(value)}" for key, value in suite.items()]
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    return damaged(rng, data) if rng.random() < 0.2 else data


def read_suite_file(data: bytes) -> None:
    """Read; what is a suite names its cases."""
    for case in read_suite(file_of(data, ".toml")):
        case.to_dict()


# Configurations

GPT2: Final = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 4,
    "n_positions": 128, "vocab_size": 1000, "activation_function": "gelu_new", "resid_pdrop": 0.1,
    "embd_pdrop": 0.1, "attn_pdrop": 0.1, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA: Final = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1000,
    "max_position_embeddings": 128, "rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}, "head_dim": 16,
}  # fmt: skip


def make_config(rng: random.Random) -> bytes:
    """A configuration with something changed."""
    data = json.dumps(mutated(rng, rng.choice((GPT2, LLAMA)))).encode()
    return damaged(rng, data) if rng.random() < 0.25 else data


def read_config(data: bytes) -> None:
    """Read and estimated."""
    _check_text(str(memplan.estimate(file_of(data, ".json"), cluster="1xh100-sxm")))


# Configurations of architectures without a family

FALCON: Final = {
    "model_type": "falcon", "architectures": ["FalconForCausalLM"], "hidden_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "vocab_size": 32, "new_decoder_architecture": False, "alibi": False,
}  # fmt: skip
MIXTRAL: Final = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": 32, "num_local_experts": 2, "num_experts_per_tok": 1, "max_position_embeddings": 32,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
}  # fmt: skip
VIT: Final = {
    "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8, "id2label": {"0": "cat", "1": "dog"},
}  # fmt: skip


def make_traced_config(rng: random.Random) -> bytes:
    """A configuration that transformers' code is traced for, with something changed."""
    return json.dumps(mutated(rng, rng.choice((FALCON, MIXTRAL, VIT)))).encode("utf-8", "surrogatepass")


def read_traced_config(data: bytes) -> None:
    """Traced anew, and estimated in few tokens."""
    model = model_from_config(file_of(data, ".json"), cache=False)
    found = memplan.estimate(model, seq_len=min(8, model.max_seq_len), cluster="1xh100-sxm")
    _check_text(str(found))
    _check_order(found, data)


# Traces


@cache
def _trace(name: str) -> dict[str, Any]:
    """A trace with its recordings in fp32 only."""
    data: dict[str, Any] = json.loads(Path(trace_file(name)).read_text())
    fp32 = [one for one in data["recordings"] if one["run"][:3] == ["float32", "", "none"]]
    return data | {"recordings": fp32}


def make_trace(rng: random.Random) -> bytes:
    """A trace with something changed; often an event, or how the module is cut into stages."""
    data = _trace(rng.choice(("hf-gpt2-untied", "phi3-mini")))
    how = rng.random()
    if how < 0.3:
        data = mutated(rng, data)
    else:
        data = deepcopy(data)
        one = rng.choice(data["recordings"])
        name = rng.choice(("cut", "ends", "boundary")) if how < 0.5 else rng.choice(list(one["parts"]))
        owner = one if how < 0.5 else one["parts"]
        owner[name] = mutated(rng, owner[name])
    text = json.dumps(data, separators=(",", ":")).encode()
    return damaged(rng, text) if rng.random() < 0.1 else text


def read_trace(data: bytes) -> None:
    """Read, and estimated whole and as two stages; on CUDA with what the allocator reserves."""
    model = model_from_trace(file_of(data, ".json"))
    common: dict[str, Any] = {"seq_len": 8, "precision": "fp32", "global_batch": 2, "dp": 1}
    for pp in (1, 2):
        where: dict[str, Any] = {"cluster": f"{pp}xh100-sxm"} if model.device == "cuda" else {"device": "cpu"}
        found = memplan.estimate(model, pp=pp, **where, **common)
        _check_order(found, f"trace, pp={pp}")


def _check_order(found: memplan.Estimate, what: object) -> None:
    figures = found.peak.total_bytes, found.allocated_bytes, found.reserved_bytes
    known = [figure for figure in figures if figure is not None]
    if known != sorted(known):
        raise Failed(f"of peak, allocated and reserved bytes a later one is smaller, {figures}: {what}")


# What numbers must obey


def make_plan(rng: random.Random) -> dict[str, Any]:
    """A plan of a small model on one node."""
    zero, tp = rng.choice((0, 1, 2, 3)), rng.choice((1, 1, 2))
    plan: dict[str, Any] = {
        "model": rng.choice(("gpt2", "gpt2-medium")),
        "cluster": rng.choice(("4xh100-sxm", "8xa100-40-sxm")),
        "zero": zero,
        "tp": tp,
        "micro_batch": 2 * rng.randrange(1, 4),
        "seq_len": 64 * rng.randrange(1, 5),
        "precision": rng.choice(("fp32", "bf16", "bf16-mixed")),
        "optimizer": rng.choice(("sgd", "sgd-momentum", "adam", "adamw")),
        "recompute": rng.choice(("none", "full")),
        "set_to_none": rng.random() < 0.7,
    }
    if not zero and rng.random() < 0.3:
        plan["ddp_comm_hook"] = "powersgd"
    return plan


def read_plan(plan: dict[str, Any]) -> None:
    """Estimated: parts add up, allocated is at least the peak, reserved at least allocated.

    A smaller batch and more sharding take no more; another thread, and sometimes another process, agree.
    """
    found = memplan.estimate(**plan)
    said = json.dumps(found.to_dict())
    for stage in found.stages:
        if stage.peak.total_bytes != sum(stage.peak.of(kind) for kind in KINDS):
            raise Failed(f"parts do not add up: {plan}")
        if stage.peak.total_bytes != n_bytes_of(stage.alive):
            raise Failed(f"the tensors alive at the peak are not its bytes: {plan}")
    _check_order(found, plan)
    smaller = memplan.estimate(**plan | {"micro_batch": plan["micro_batch"] // 2})
    if smaller.peak.total_bytes > found.peak.total_bytes:
        raise Failed(f"a smaller batch takes more: {plan}")
    if plan["zero"] and plan["zero"] < 3:
        sharded = memplan.estimate(**plan | {"zero": 3})
        if sharded.worst.states.total_bytes > found.worst.states.total_bytes:
            raise Failed(f"more sharding takes more between steps: {plan}")
    with ThreadPoolExecutor(1) as pool:
        if pool.submit(lambda: json.dumps(memplan.estimate(**plan).to_dict())).result() != said:
            raise Failed(f"another thread has other numbers: {plan}")
    if plan["seq_len"] == 64 and plan["micro_batch"] == 2:
        code = f"import json, memplan; print(json.dumps(memplan.estimate(**{plan!r}).to_dict()))"
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        if other.stdout.strip() != said:
            raise Failed(f"another process has other numbers: {plan}")


# Snapshots


@cache
def _snapshot_case() -> Case:
    return Case(
        name="small", model=SMALL["llama-small"], plan=Plan(seq_len=32), device="cuda", gpu="h100-sxm"
    )


def snapshot_of(n: int = 12) -> dict[str, Any]:
    """A small snapshot as `torch.cuda.memory._dump_snapshot` writes it."""
    frames = [{"name": "forward", "filename": "/a/model.py", "line": 7}]
    trace = [
        {"action": action, "addr": 512 * i, "size": 512 * (i % 5 + 1), "frames": frames}
        for action in ("alloc", "free_requested")
        for i in range(1, n + 1)
    ]
    block = {
        "address": 10**6,
        "size": 1024,
        "requested_size": 1000,
        "state": "active_allocated",
        "frames": frames,
    }
    return {"segments": [{"device": 0, "address": 10**6, "blocks": [block]}], "device_traces": [trace]}


def with_shared(rng: random.Random, value: Any) -> Any:
    """The value with a list in some place that holds others by reference, or itself many times."""
    every = list(places(value))
    shared: Any = rng.choice(([1], {"frames": []}, snapshot_of(1)["device_traces"][0]))
    if rng.random() < 0.5:
        for _ in range(rng.choice((20, 60))):
            shared = [shared, shared]
    else:
        shared = [shared] * 10_000
    if not every:
        return shared
    *path, last = rng.choice(every)
    owner = value
    for key in path:
        owner = owner[key]
    owner[last] = shared
    return value


def make_snapshot(rng: random.Random) -> bytes:
    """A pickle with something changed."""
    value = mutated(rng, snapshot_of()) if rng.random() < 0.7 else snapshot_of()
    if rng.random() < 0.3:
        value = with_shared(rng, value)
    data = pickle.dumps(value, protocol=rng.choice((2, 3, 4, 5)))
    return damaged(rng, data) if rng.random() < 0.4 else data


def read_snapshot_file(data: bytes) -> None:
    """Read and explained."""
    file = file_of(data, ".pickle")
    _check_text(str(explained("snapshot", snapshot_comparison(_snapshot_case(), 0, file))))


# Names that go into pages, tables and the terminal


ENDS: Final[tuple[dict[str, Any], ...]] = (
    *({"outcome": outcome} for outcome in ("crashed", "refused", "timed-out", "ok")),
    {"outcome": "ok", "peak_error": 0.5, "states_off_bytes": 0, "collectives_off": 0},
)
"""How a case ended, where nothing is known of its ranks."""


def make_names(rng: random.Random) -> list[Record]:
    """Records whose texts are hostile."""
    texts = [text for text in HOSTILE_TEXTS if text]
    return [
        Record(
            case=replace(_snapshot_case(), name=f"{rng.choice(texts)}{rng.choice(texts)} {i}").to_dict(),
            **rng.choice(ENDS),
            reason=f"rank 0: {rng.choice(texts)}\n{rng.choice(texts)}",
            environment={rng.choice(texts): rng.choice(texts)},
        )
        for i in range(3)
    ]


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        if any(name.startswith("on") for name, _ in attrs):
            raise Failed(f"an attribute that runs: {attrs}")


def read_names(records: list[Record]) -> None:
    """As a page, a table and text: nothing of a name is taken for code."""
    elements = _Elements()
    elements.feed(page.html(records, sources=[records[0].case["name"]]))
    if elements.found.count("script") != 1 or "img" in elements.found:
        raise Failed(f"a name has become an element: {[record.case['name'] for record in records]}")
    for row in csv.reader(io.StringIO(tables.csv_text(tables.frame(records)))):
        if any(cell.startswith(("=", "@", "+")) for cell in row):
            raise Failed(f"a cell is a formula: {row}")
    _check_text(report.listing(records, []))


# Others' rows, timings, expressions


@cache
def _published() -> list[list[str]]:
    with memory.ROWS.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def make_published(rng: random.Random) -> bytes:
    """The head and a row, with cells changed."""
    head, *rows = _published()
    row = list(rng.choice(rows))
    for _ in range(rng.choice((1, 1, 2, 4))):
        row[rng.randrange(len(row))] = str(any_value(rng, 0))
    text = io.StringIO()
    csv.writer(text).writerows([head, row])
    data = text.getvalue().encode("utf-8", "surrogatepass")
    return damaged(rng, data) if rng.random() < 0.3 else data


def read_published(data: bytes) -> None:
    """Read and compared; a trace that only a changed row needs takes a compiler's seconds, and is refused."""

    def missing(asked: Request) -> TracedModel:
        raise InvalidValue(f"no trace of {asked.name} is on file; use python -m validate.adapted.")

    rows = memory.read_rows(file_of(data, ".csv"))
    with patch.object(traces, "_traced", partial(on_file, traced=missing)):
        _check_text(memory.table([memory.compared(row) for row in rows]))


TIMING: Final = {
    "kind": "matmul",
    "dtype": "bf16",
    "sizes": {"m": 64},
    "runs": 9,
    "median_s": 0.1,
    "least_s": 0.1,
}


def make_timings(rng: random.Random) -> bytes:
    """A line of a calibration with something changed."""
    data = json.dumps(mutated(rng, TIMING)).encode() + b"\n"
    return damaged(rng, data) if rng.random() < 0.4 else data


def read_timing_file(data: bytes) -> None:
    """Read and printed."""
    for timing in read_timings(file_of(data, ".jsonl")):
        str(timing)


WORDS: Final = (
    *RECORD_FIELDS,
    *shlex.split("and or not in == < >= != ( ) [ ] , + * // % ** . 1 0 1e999 abs None True lambda:"),
    *("'cpu'", '"x"', "9" * 400, "__import__('os')"),
)


NUMBERS: Final = ("tp", "dp", "zero", "peak_error", "seq_len", "n_layers")


def make_where(rng: random.Random) -> str:
    """Comparisons, some of them with another word at some place; or words in any order."""
    if rng.random() < 0.3:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 14)))
    parts = []
    for _ in range(rng.randrange(1, 4)):
        field, value = (
            rng.choice(list(RECORD_FIELDS)),
            rng.choice((*RECORD_FIELDS, "1", "0.5", "'cpu'", "True")),
        )
        parts += [
            field,
            rng.choice(("==", "<", ">=", "!=", "in")),
            value,
            rng.choice(("and", "or", "and not")),
        ]
    if rng.random() < 0.3:
        parts[rng.randrange(len(parts))] = rng.choice(WORDS)
    return " ".join(parts[:-1])


@cache
def _facts() -> Mapping[str, Any]:
    return record_facts(read_records(data_folder() / "measurements" / "quick.jsonl")[0])


def read_expression(text: str) -> None:
    """Read and asked of a record."""
    read_where(text)(_facts())


# Command lines

VALUES: Final = (
    *shlex.split("1 2 3 4 8 0 -1 1.5 0.1 nan inf 1e400 99999 2147483647 x -- -h = a,b 1,2 1,,2 é None True"),
    *shlex.split("full block torch bf16 bf16-mixed fp32 adamw sgd zbv gpipe 200Gbit/s 25GB/s"),
    *("", " ", "\x1b[2J", "9" * 400),
)

MODELS: Final = ("gpt2", "gpt2", "llama-3-8b", "llama", "no-model", "./nowhere.json", "'\x1b'")
PLANS: Final = ("zero=3", "tp=2", "pq=1", "zero=2,offload", "tp=two", "=")
CLUSTERS: Final = tuple(
    f"--cluster {name}" for name in ("1xh100-sxm", "2xa100-40-sxm", "2xcpu", "8xh100", "x", "0xh200")
)
BATCHES: Final = tuple(f"--global-batch {value}" for value in ("2", "4", "x", "0", "-1"))
SEARCHES: Final = tuple(
    f"--seq-len 64 --keep 2 --micro-batch 1 --recompute none --schedule 1f1b --objective {objective}"
    for objective in ("speed", "memory", "x")
)
BUDGETS: Final = ("--tokens 1e9", "--tokens x", "--tokens 0", "--price-per-gpu-hour -2")
SUITES: Final = tuple(f"--suite {name}" for name in ("quick", "refused", "qick", "x.toml", "''"))
FILES: Final = ("nowhere.jsonl", ".", "data/measurements/refused.jsonl", "/dev/null", "-")
NEVER_RUN: Final = ("--zero 7", "--dp 99999", "--model nothing", "--tp 0", "--pp x")

Parts = tuple[tuple[str, ...], ...]
"""What a command line is made of: of each part one, in this order."""

COMMANDS: Final[Mapping[str, Parts]] = {
    "estimate": (MODELS, CLUSTERS),
    "compare": (MODELS, PLANS, PLANS, CLUSTERS, BATCHES),
    "advise": (MODELS, CLUSTERS),
    "budget": (MODELS, CLUSTERS, BUDGETS),
    "search": (MODELS, CLUSTERS, BATCHES, SEARCHES),
    **dict.fromkeys(("models", "gpus", "nothing"), ()),
}
VALIDATE_COMMANDS: Final[Mapping[str, Parts]] = {
    "sweep": (("--list", "--dry-run"), SUITES),
    "report": (FILES,),
    "rejudge": (FILES, ("--out /dev/full",)),
    "published": (("nowhere.csv", "/dev/null", ".", "README.md"),),
    **dict.fromkeys(("run", "explain"), (NEVER_RUN,)),
    "nothing": (),
}
LEFT_OUT: Final = ("--objective", "--keep", "--device")
"""Flags that could make a command run for minutes."""


def command_line(rng: random.Random, group: click.Group, known: Mapping[str, Parts]) -> list[str]:
    """A command, flags with values that may suit them, and what it needs last, so that it counts."""
    name = rng.choice(list(known))
    command = group.get_command(click.Context(group), name)
    arguments = [name]
    options = [] if command is None else _options(command)
    for option in rng.choices(options, k=rng.randrange(5)) if options else ():
        arguments.append(rng.choice(option.opts + option.secondary_opts))
        if not option.is_flag and rng.random() < 0.95:
            named = (option.metavar or "").split("|")
            arguments.append(rng.choice(VALUES if rng.random() < 0.5 or len(named) < 2 else named))
    return [*arguments, *(word for part in known[name] for word in shlex.split(rng.choice(part)))]


def _options(command: click.Command) -> list[click.Option]:
    """The flags of a command, but for those that write files."""
    own = command.options_of(USUAL_ENGINE) if isinstance(command, PlanCommand) else ()
    return [
        option
        for option in (*command.params, *own)
        if isinstance(option, click.Option)
        and not isinstance(option.type, click.Path)
        and option.opts[0] not in LEFT_OUT
    ]


def make_arguments(rng: random.Random) -> list[str]:
    """A command line of memplan."""
    return command_line(rng, commands, COMMANDS)


def run_arguments(arguments: list[str]) -> None:
    """Run, and ended as it should be."""
    _check_ended(arguments, CliRunner().invoke(commands, arguments))


def make_validate_arguments(rng: random.Random) -> list[str]:
    """A command line of validate that runs no rank."""
    return command_line(rng, validate_commands, VALIDATE_COMMANDS)


def run_validate_arguments(arguments: list[str]) -> None:
    """Run, and ended as it should be."""
    _check_ended(arguments, CliRunner().invoke(validate_commands, arguments))


def _check_ended(arguments: list[str], result: Any) -> None:
    said = shlex.join(arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise Failed(f"{said}: {result.exception!r}") from result.exception
    if result.exit_code not in (0, 1, 2):
        raise Failed(f"{said}: exit code {result.exit_code}")
    if result.exit_code == 2 and (result.stdout or result.stderr.count("\n") != 1):
        raise Failed(f"{said}: {result.stderr[:500]!r}")
    _check_text(result.output.replace("\b", ""))


# Signals

INTERRUPTED: Final = (
    "estimate gpt2 --cluster 8xh100-sxm --zero 3",
    "export gpt2 --cluster 8xh100-sxm --to torchrun --out out/plan",
    "search llama-3-8b --cluster 64xh100-sxm --global-batch 512",
    "longest-sequence gpt2 --cluster 8xh100-sxm --global-batch 8",
)
"""Commands that take from a moment to some seconds; what one writes is out/plan."""

Interrupted = tuple[str, signal.Signals, float]
"""A command, a signal, and the seconds after which it comes."""


def make_signal(rng: random.Random) -> Interrupted:
    """A command and when it is interrupted: while Python starts, too."""
    stop = rng.choice((signal.SIGINT, signal.SIGTERM))
    return rng.choice(INTERRUPTED), stop, rng.uniform(0.05, 2.0)


def run_interrupted(made: Interrupted) -> None:
    """Run: it ends by itself or by the signal, says nothing of its insides, and leaves no part of a file."""
    command, stop, after_s = made
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "out").mkdir()
        process = subprocess.Popen(
            [sys.executable, "-m", "memplan", *command.split()],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(Path(memplan.__file__).parents[1])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with suppress(subprocess.TimeoutExpired):
            process.wait(after_s)
        process.send_signal(stop)
        try:
            said, complaint = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise Failed(f"{made}: it runs on after the signal") from None
        left = [file.name for file in Path(folder).rglob("*") if file.is_file()]
    ended = process.returncode
    if "Traceback" in complaint and str(Path(memplan.__file__).parent) not in complaint:
        return  # while Python itself starts, whose traceback it is
    if ended not in (0, -stop, 128 + stop):
        raise Failed(f"{made}: exit code {ended}, {complaint[-500:]!r}")
    if "Traceback" in said + complaint:
        raise Failed(f"{made}: {complaint[-500:]!r}")
    if left != (["plan"] if ended == 0 and "--out" in command else []):
        raise Failed(f"{made}: exit code {ended}, and it leaves {left}")


TARGETS: Final = (
    Target(name="records", make=make_records, read=read_record_file),
    Target(name="suites", make=make_suite, read=read_suite_file),
    Target(name="configs", make=make_config, read=read_config),
    Target(name="snapshots", make=make_snapshot, read=read_snapshot_file),
    Target(name="traced configs", make=make_traced_config, read=read_traced_config, most_s=MOST_TRACED_S),
    Target(name="traces", make=make_trace, read=read_trace),
    Target(name="numbers", make=make_plan, read=read_plan),
    Target(name="names", make=make_names, read=read_names),
    Target(name="published", make=make_published, read=read_published),
    Target(name="timings", make=make_timings, read=read_timing_file),
    Target(name="expressions", make=make_where, read=read_expression),
    Target(name="commands", make=make_arguments, read=run_arguments),
    Target(name="validate commands", make=make_validate_arguments, read=run_validate_arguments),
    Target(name="signals", make=make_signal, read=run_interrupted),
)

SHARES: Final = {
    "numbers": 0.1,
    "names": 0.25,
    "published": 0.5,
    "validate commands": 0.5,
    "traced configs": 0.02,
    "signals": 0.01,
}
"""How many inputs of a target there are for each of the others', where it is not one: these take longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a target's inputs: how many there were, were refused and failed, and the slowest."""

    n_inputs: int
    n_refused: int
    slowest_s: float
    failures: tuple[str, ...]


def tried(target: Target, *, seed: int, first: int, n_inputs: int) -> Outcome:
    """The inputs of a target, from the first on, each timed without the garbage of what ran before them."""
    gc.collect()
    gc.freeze()
    n_refused, slowest_s, failures = 0, 0.0, []
    for number in range(first, first + n_inputs):
        made = target.make(random.Random(f"{seed} {target.name} {number}"))
        began_s = time.process_time()
        why = ""
        try:
            target.read(made)
        except MemplanError as error:
            n_refused += 1
            why = "" if str(error).strip() else "a refusal that says nothing"
        except Exception:
            why = traceback.format_exc()
        seconds = time.process_time() - began_s
        slowest_s = max(slowest_s, seconds)
        if seconds > target.most_s:
            why += f"it took {seconds:.1f} s"
        if why:
            failures.append(f"{target.name} {number}: {str(made)[:300]!r}\n{why}")
    return Outcome(n_inputs=n_inputs, n_refused=n_refused, slowest_s=slowest_s, failures=tuple(failures))


def inputs_of(target: Target, total: int) -> int:
    """How many of all inputs are a target's, rounded up."""
    shares = {each.name: SHARES.get(each.name, 1.0) for each in TARGETS}
    return ceil(total * shares[target.name] / sum(shares.values()))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--inputs", default=100_000, show_default=True, help="How many in all; with --only, of that target."
)
@click.option("--seed", default=0, show_default=True)
@click.option("--first", default=0, show_default=True, help="The number of the first input.")
@click.option("--only", type=click.Choice([target.name for target in TARGETS]), help="This target only.")
def main(inputs: int, seed: int, first: int, only: str | None) -> None:
    """Hostile inputs for every reader; exit code 1 if one does not withstand them."""
    failed = 0
    for target in TARGETS:
        if only in (None, target.name):
            n = inputs if only else inputs_of(target, inputs)
            began_s = time.monotonic()
            outcome = tried(target, seed=seed, first=first, n_inputs=n)
            failed += len(outcome.failures)
            click.echo(
                f"{target.name:<18}{outcome.n_inputs:>8,} inputs{outcome.n_refused:>8,} refused"
                f"{len(outcome.failures):>6} failed, slowest {outcome.slowest_s:.2f} s, "
                f"{time.monotonic() - began_s:.0f} s in all"
            )
            for failure in outcome.failures[:5]:
                click.echo(failure, err=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
