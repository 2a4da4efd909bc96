"""Runs exported scripts under torchrun, each in fresh processes, and measures the peak of a step of each.

Called on CPU ranks with a JSON file of scripts' paths, as `torchrun ... launched.py scripts.json`. Each rank
writes the peak and the losses of each script into `SCRIPT.RANK.json`.
"""

import gc
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.profiler import record_function

from validate.gloo import let_ranks_go_first, nothing_held_after_waits
from validate.memory import STEP, MemoryProfile, count_all_threads, during

N_WARM_UP, N_OBSERVED = 3, 2
IMPORTED_ONCE = (
    *("torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
    "transformers.models.auto.modeling_auto",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "gpt_neox", "llama")),
)
"""What scripts import or call, imported before processes are forked, so that each has them."""

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def measure(script: Path) -> None:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    step = module.prepared()
    let_ranks_go_first()
    losses = [step() for _ in range(N_WARM_UP)]
    gc.collect()
    dist.barrier()
    with nothing_held_after_waits(), MemoryProfile(paths=False) as profile:
        for _ in range(N_OBSERVED):
            with record_function(STEP):
                losses.append(step())
            gc.collect()
            dist.barrier()
    recorded = profile.recorded((STEP,))
    steps = [during(recorded.events, region) for region in recorded.regions[STEP]]
    peak = min(max(event.total_bytes for event in one) for one in steps)
    script.with_suffix(f".{RANK}.json").write_text(json.dumps({"peak_bytes": peak, "losses": losses}))
    dist.destroy_process_group()


def measured_in_a_fork(script: Path) -> None:
    """A process of its own: what one script leaves behind would count for the next."""
    if pid := os.fork():
        if os.waitpid(pid, 0)[1]:
            sys.exit(f"{script} failed")
        return
    code = 1
    try:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        begin = dist.init_process_group

        def started(backend: str) -> None:
            begin(backend, store=dist.PrefixStore(script.name, store), rank=RANK, world_size=WORLD_SIZE)

        with patch.object(dist, "init_process_group", started):
            measure(script)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> None:
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)
    count_all_threads()
    torch.manual_seed(0)
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    gc.disable()
    gc.freeze()
    for script in json.loads(Path(sys.argv[1]).read_text()):
        measured_in_a_fork(Path(script))


if __name__ == "__main__":
    main()
