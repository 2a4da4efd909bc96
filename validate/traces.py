"""Writes the traces of other people's modules: `python -m validate.traces [NAME ...]`.

Left out: the small ones. A model of true size (`AT_TRUE_SIZE`) is traced on a GPU that is not there, which
takes a CUDA build of PyTorch.
"""

import os
import subprocess
import sys
from typing import Final

import torch

from memplan.hardware import gpu
from validate.nogpu import environment_for
from validate.shipped import data_folder
from validate.systems.torch.wild import AT_TRUE_SIZE, IN_SMALL, wild_trace

GPU: Final = "h200"
"""The GPU that is played."""


def main(names: list[str]) -> None:
    """Trace these modules anew."""
    for name in names or IN_SMALL:
        if name in AT_TRUE_SIZE and not torch.cuda.is_available():
            played = {**os.environ, **environment_for(gpu(GPU))}
            subprocess.run([sys.executable, "-m", "validate.traces", name], env=played, check=True)
            continue
        model = wild_trace(name)
        model.save(data_folder() / "traces" / f"{name}.json")
        found = f"{model.n_parameters:,} parameters, {model.n_layers} blocks, {model.made_with}"
        print(f"{name}: {found}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
