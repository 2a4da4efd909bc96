"""Traces every language model of transformers in small: `python -m validate.architectures [NAME ...]`.

Each is made, trained for a step and traced in a process of its own. The traces are written to
`data/traces/architectures`, and to `left-out.csv` there the names of the others, each with the reason.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from memplan.text_tables import csv_of
from validate.cases import ARCHITECTURES, Divided, architecture_traces
from validate.systems.torch.architectures import architectures
from validate.systems.torch.wild import loss_of, wild_named, wild_trace
from validate.traces import write_packed

TIMEOUT_S = 90.0
"""Most are traced within 5 s; some loop over tokens or chunks in Python."""

NOT_RUN = {
    "hf-causal-fuyu": "takes more than 90 s",
    "hf-causal-got_ocr2": "its runs take more than 240 s",
    "hf-causal-moss_transcribe_diarize": "has 20 GiB in small",
    "hf-causal-recurrent_gemma": "its loop over tokens is too long for the profiler's memory",
}
"""What is not traced, since 2 cores and 24 GiB cannot run it beside its trace."""


def traced(name: str) -> str:
    """Trace an architecture in another process; why that failed, or an empty text."""
    if name in NOT_RUN:
        return NOT_RUN[name]
    command = [sys.executable, "-m", "validate.architectures", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"takes more than {TIMEOUT_S:g} s"
    return "" if done.returncode == 0 else done.stderr.strip().rpartition("\n")[2].strip()


def trace(name: str) -> None:
    """Make an architecture, train it for a step, trace it and write its trace."""
    wild = wild_named(name)
    torch.manual_seed(0)
    loss_of(wild.module().train(), wild.inputs(2, wild.seq_len, torch.Generator().manual_seed(0))).backward()
    write_packed(wild_trace(Divided(name)), ARCHITECTURES / f"{name}.json.xz")


def main() -> None:
    """Trace the architectures that are named, or all that have no trace on file."""
    if names := sys.argv[1:]:
        for name in names:
            trace(name)
        return
    names = sorted(set(architectures()) - set(architecture_traces()))
    left_out = []
    with ThreadPoolExecutor(max_workers=2) as pool:
        for name, reason in zip(names, pool.map(traced, names), strict=True):
            print(name, reason, flush=True)
            if reason:
                left_out.append({"architecture": name, "reason": reason})
    (ARCHITECTURES / "left-out.csv").write_text(csv_of(left_out, ["architecture", "reason"]))


if __name__ == "__main__":
    main()
