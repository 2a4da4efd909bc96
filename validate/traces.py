"""Writes the traces of other people's modules: `python -m validate.traces [NAME ...]`.

`NAME.tp8` is the module divided over eight tensor ranks, `NAME.ep4` over four expert-parallel ones.
"""

import lzma
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from memplan import TracedModel
from validate.cases import DIVIDED, divided_named, divided_traces, trace_file
from validate.systems.torch.wild import IN_SMALL, wild_trace


def main(names: list[str]) -> None:
    """Trace these modules anew; left out: all small ones, and all divided ones that have a trace."""
    for asked in [divided_named(name) for name in names or IN_SMALL] + [*([] if names else divided_traces())]:
        model = wild_trace(asked)
        if asked.mesh:
            write_packed(model, DIVIDED / f"{asked}.json.xz")
        else:
            model.save(trace_file(asked.name))
        found = f"{model.n_parameters:,} parameters, {model.n_layers} blocks, {model.made_with}"
        print(f"{asked}: {found}", flush=True)


def write_packed(model: TracedModel, path: Path) -> None:
    """Write a trace, compressed."""
    with TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        model.save(plain)
        path.write_bytes(lzma.compress(plain.read_bytes()))


if __name__ == "__main__":
    main(sys.argv[1:])
