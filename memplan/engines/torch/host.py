"""The host's memory for a rank whose states FSDP or torchao offloads, or whose blocks keep inputs there.

Weights and gradients are page-locked (`CPUOffloadPolicy.pin_memory`), each in its own block; optimizer state
is not. The update runs on the CPU. What is kept of activations is page-locked too, and its blocks are used
again by each micro-batch.

Assumes: copies back to the GPU are done when the next micro-batch begins.
Source: `torch.autograd.graph:save_on_cpu`, `torch.distributed.fsdp._fully_shard._fsdp_api:CPUOffloadPolicy`,
`torch.distributed.fsdp._fully_shard._fsdp_collectives:foreach_reduce`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from memplan.allocator import page_locked_bytes
from memplan.engines.base import HostRecord
from memplan.engines.torch.cpu_offload import on_host
from memplan.engines.torch.optimizer import update
from memplan.engines.torch.stage import RankStages
from memplan.memory import Alive
from memplan.mesh import HOST
from memplan.record import Collective, allocs, chain, events, frees
from memplan.shapes import UINT8, Buffer, buffer_of


def host_of(stages: RankStages) -> HostRecord | None:
    """The host's record for the rank; None without offload."""
    saved = Counter(dict(_saved(stages) if stages.options.activation_offloading != "none" else ()))
    if stages.plan.kept.on_host:
        pinned, pageable = on_host(stages)
        of_blocks = _rests_of_blocks([(one.name, one.n_bytes, one.n_bytes, n) for one, n in pinned.items()])
        return HostRecord(pinned=pinned + saved + of_blocks, pageable=pageable, step=chain("host"))
    if not stages.offloads:
        return HostRecord(pinned=saved, pageable=Counter(), step=chain("host")) if saved else None
    states = stages.states
    moments = Counter({buffer: n for buffer, n in states.items() if buffer.kind == "optimizer"})
    pinned = states - moments + stages.grads + _rests_of_blocks(stages.page_locked)
    plan = stages.plan
    older = not stages.options.set_to_none or (plan.pp == 1 and plan.n_micro_batches > 1)
    added = list(stages.grads) if older else []
    arrived = [buffer_of(f"{b.name} (arrived, to be added)", b.shape, b.dtype) for b in added]
    copies = [event for buffer in arrived for event in (*allocs(buffer), *frees(buffer))]
    return HostRecord(
        pinned=pinned + saved,
        pageable=moments + stages.step_counts,
        step=chain("host", events("accumulation", copies), update(stages)),
    )


def _rests_of_blocks(page_locked: Iterable[tuple[str, int, int, int]]) -> Alive:
    """The rest of each page-locked block."""
    return Counter(dict([rest for one in page_locked for rest in _rest_of_block(*one)]))


def _rest_of_block(name: str, counted_bytes: int, n_bytes: int, n: int) -> Iterator[tuple[Buffer, int]]:
    """What is left of the page-locked blocks of `n` tensors: blocks are powers of two."""
    if spare := page_locked_bytes(n_bytes) - counted_bytes:
        yield buffer_of(f"{name} (rest of its page-locked block)", (spare,), UINT8), n


def _saved(stages: RankStages) -> Iterator[tuple[Buffer, int]]:
    """What the host keeps of activations in a micro-batch, and the rest of its page-locked blocks."""
    sent: Counter[tuple[str, int]] = Counter()
    for stage in stages:
        trace = stage.trace
        for segment, n in [(trace.embed, 1), *stage.forward_order, (trace.head, 1), (trace.loss, 1)]:
            for event in segment.events:
                if isinstance(event, Collective) and event.axis == HOST:
                    sent[event.what.removesuffix(", forward"), event.payload_bytes] += n
    for (what, n_bytes), n in sent.items():
        yield buffer_of(what, (n_bytes,), UINT8, "activations"), n
        yield from _rest_of_block(what, n_bytes, n_bytes, n)
