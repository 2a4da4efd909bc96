"""The host's memory for a rank whose states FSDP offloads.

Weights and gradients are page-locked (`CPUOffloadPolicy.pin_memory`), each in its own block; optimizer state
is not. The update runs on the CPU.

Source: `torch.distributed.fsdp._fully_shard._fsdp_api:CPUOffloadPolicy`,
`torch.distributed.fsdp._fully_shard._fsdp_collectives:foreach_reduce`.
"""

from collections import Counter
from collections.abc import Iterator

from memplan.allocator import page_locked_bytes
from memplan.engines.base import HostRecord
from memplan.engines.torch.optimizer import update
from memplan.engines.torch.stage import RankStages
from memplan.record import allocs, chain, events, frees
from memplan.shapes import UINT8, Buffer, buffer_of


def host_of(stages: RankStages) -> HostRecord | None:
    """The host's record for the rank; None without offload."""
    if not stages.offloads:
        return None
    states = stages.states
    pageable = Counter({buffer: n for buffer, n in states.items() if buffer.kind == "optimizer"})
    pinned = states - pageable + stages.grads + Counter(dict(_rest_of_blocks(stages)))
    plan = stages.plan
    older = not stages.options.set_to_none or (plan.pp == 1 and plan.n_micro_batches > 1)
    added = list(stages.grads) if older else []
    arrived = [buffer_of(f"{b.name} (arrived, to be added)", b.shape, b.dtype) for b in added]
    copies = [event for buffer in arrived for event in (*allocs(buffer), *frees(buffer))]
    return HostRecord(
        pinned=pinned, pageable=pageable, step=chain("host", events("accumulation", copies), update(stages))
    )


def _rest_of_blocks(stages: RankStages) -> Iterator[tuple[Buffer, int]]:
    """The rest of each page-locked block: blocks are powers of two."""
    for name, counted_bytes, n_bytes, n in stages.page_locked:
        spare = page_locked_bytes(n_bytes) - counted_bytes
        if spare:
            yield buffer_of(f"{name} (rest of its page-locked block)", (spare,), UINT8), n
