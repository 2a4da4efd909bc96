"""Writes the traces of other people's modules: `python -m validate.traces [NAME ...]`."""

import sys

from validate.cases import trace_file
from validate.systems.torch.wild import IN_SMALL, wild_trace


def main(names: list[str]) -> None:
    """Trace these modules anew; left out: all small ones."""
    for name in names or IN_SMALL:
        model = wild_trace(name)
        model.save(trace_file(name))
        found = f"{model.n_parameters:,} parameters, {model.n_layers} blocks, {model.made_with}"
        print(f"{name}: {found}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
