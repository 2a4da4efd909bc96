"""Asks cuDNN what a trace's convolutions take beside their results: `python -m validate.workspaces FILE ...`.

PyTorch's CUDA build runs each of them without a GPU, and what it allocates beside the result is cuDNN's own
statement (`validate/nogpu`). The answers are written into the trace, for these GPUs and micro-batches.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from memplan.errors import InvalidValue
from memplan.hardware import gpu
from memplan.models import TracedModel
from memplan.models.recording import TracedEvent, shape_at
from memplan.models.trace_from_json import is_trace, model_from_trace
from memplan.models.workspaces import Asked, runs_of
from memplan.tracing.recorder import executed
from memplan.tracing.scratch import CONVOLUTION, CONVOLUTION_BACKWARD
from validate.cases import trace_file
from validate.nogpu import environment_for

GPUS: Final = ("a100-80-sxm", "h100-sxm", "h200", "b200")

BATCHES: Final = (1, 2, 4, *range(8, 513, 8), 768, 1024)
"""The micro-batches that are asked for; between them cuDNN may choose other engines."""

Question = tuple[str, Sequence[int], str]
"""A convolution's part, sizes and type."""


def asked_of_cudnn(model: TracedModel) -> TracedModel:
    """The model with the workspaces of its convolutions on `GPUS`, for `BATCHES`.

    Raises:
        InvalidValue: it was traced with another release of PyTorch, or convolves along a sequence.
        NoGpuUnavailable: without a CUDA build of PyTorch or a compiler.
    """
    release = f"torch {torch.__version__.partition('+')[0]}"
    convolutions = list(dict.fromkeys(_convolutions(model)))
    if any(term.seq_power for one in convolutions for size in one.shape for term in size):
        raise InvalidValue(f"{model.name} has convolutions along a sequence, of any length.")
    if not f"{model.made_with},".startswith(f"{release},"):
        raise InvalidValue(f"{model.name} was traced with {model.made_with}, and this is {release}.")
    runs = {}
    for name in GPUS:
        questions = [
            (one.kernel, shape_at(one.shape, batch, 1), one.dtype)
            for one in convolutions
            for batch in BATCHES
        ]
        answers = iter(_answers(name, questions))
        tables = [runs_of({batch: next(answers) for batch in BATCHES}) for _ in convolutions]
        runs[name] = dict(zip(convolutions, tables, strict=True))
    return replace(model, asked=Asked(library=_library(), batches=BATCHES, runs=runs))


def _convolutions(model: TracedModel) -> Iterator[TracedEvent]:
    for recording in model.recordings.values():
        for events in recording.parts.values():
            yield from (event for event in events if event.kind == "workspace")


def _library() -> str:
    version = torch.backends.cudnn.version() or 0
    return f"cuDNN {version // 10_000}.{version // 100 % 100}.{version % 100}"


def _answers(gpu_name: str, questions: Sequence[Question]) -> list[int]:
    """What a process that sees the GPU answers to each question."""
    around = dict(os.environ) | environment_for(gpu(gpu_name)) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "validate.workspaces"]
    text = json.dumps(questions)
    ended = subprocess.run(command, input=text, capture_output=True, text=True, check=False, env=around)
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise InvalidValue(f"cuDNN could not be asked for {gpu_name}: {last}")
    found: list[int] = json.loads(ended.stdout.splitlines()[-1])
    return found


def _answer(part: str, sizes: Sequence[int], dtype: str) -> int:
    """The most bytes that PyTorch allocates beside the result of a convolution, on this process's GPU."""
    n = (len(sizes) - 8) // 6  # dims of an image
    *around, groups, transposed, image_last, weight_last = sizes[2 * n + 4 :]
    image = _image(sizes[: n + 2], dtype, image_last)
    weight = _image(sizes[n + 2 : 2 * n + 4], dtype, weight_last)
    stride, padding, dilation, output_padding = (around[i * n : (i + 1) * n] for i in range(4))
    how: tuple[Any, ...] = (stride, padding, dilation, bool(transposed), output_padding, groups)
    device = torch.device("cuda", 0)
    if part == "output":
        _, scratch = executed(CONVOLUTION, (image, weight, None, *how), {}, device)
    else:
        output = CONVOLUTION(image.to("meta"), weight.to("meta"), None, *how)
        grad = _image(output.shape, dtype, image_last or weight_last)
        args = grad, image, weight, None, *how, [part == "input", part == "weight", False]
        _, scratch = executed(CONVOLUTION_BACKWARD, args, {}, device)
    return sum([n_elements for _, n_elements, _ in scratch])


def _image(shape: Sequence[int], dtype: str, channels_last: int) -> Tensor:
    order = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(shape, dtype=getattr(torch, dtype), device="cuda", memory_format=order)


def main(names: Sequence[str]) -> None:
    """Ask about the convolutions of these traces: files, or names of shipped ones."""
    for name in names:
        file = name if is_trace(name) else trace_file(name)
        asked_of_cudnn(model_from_trace(file)).save(file)
        print(f"{name}: {_library()} asked for {', '.join(GPUS)}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1:])
    else:
        print(json.dumps([_answer(*question) for question in json.load(sys.stdin)]))
