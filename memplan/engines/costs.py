"""The costs of a model's parts, from which a search bounds plans: read off the trace of a micro-batch."""

from collections.abc import Mapping, Sequence

from memplan.engines.base import Costs, PartCosts, WireBytes
from memplan.passes.trace import Block, Segment, Trace
from memplan.record import Collective, Compute, frees
from memplan.shapes import Parameter


def part_costs(
    trace: Trace,
    plain: Mapping[str, Block],
    recomputed: Mapping[str, Block],
    wire_bytes: WireBytes,
    tp: int,
    *,
    keeps_received: bool = False,
    frees_output: bool = False,
) -> PartCosts:
    """The costs of the trace's ends, and of a block of each kind, recomputed or not.

    `wire_bytes`: what one of `tp` ranks sends in a collective; `keeps_received`: whether a stage keeps a
    buffer for what it receives of each micro-batch; `frees_output`: whether it frees what it has sent.
    """

    def costs(
        parameters: Sequence[Parameter],
        forward: Sequence[Segment],
        backward: Segment,
        computing: Sequence[Segment],
    ) -> Costs:
        events = [e for each in (*forward, backward) for e in each.events]
        sent = [e for e in events if isinstance(e, Collective) and e.axis == "tp" and e.beside is None]
        computed = [e for each in computing for e in each.events if isinstance(e, Compute)]
        return Costs(
            elements=sum([p.n_elements for p in parameters if p.requires_grad]),
            computed=tuple([e for e in computed if e.phase != "backward"]),
            backward=tuple([e for e in events if isinstance(e, Compute) and e.phase == "backward"]),
            sent_bytes=sum([wire_bytes(e.kind, e.payload_bytes, tp) for e in sent]),
            saved_bytes=sum([each.stretch("").net_bytes for each in forward]),
        )

    def block_costs(block: Block, computing: Segment) -> Costs:
        return costs(block.parameters, (block.forward, block.casts), block.backward, [computing])

    freed = Segment(frees(*trace.in_flight))
    embedding = trace.embed, trace.embed_casts, freed
    head = trace.head, trace.head_casts, trace.loss
    return PartCosts(
        embedding=costs(trace.embed_parameters, embedding, trace.embed_backward, embedding),
        head=costs(trace.head_parameters, head, trace.head_backward, head),
        output=Costs(0, (), (), 0, -trace.boundary.n_bytes if frees_output else 0),
        blocks={kind: block_costs(block, block.forward) for kind, block in plain.items()},
        recomputed={kind: block_costs(block, block.backward) for kind, block in recomputed.items()},
        boundary_bytes=trace.boundary.n_bytes,
        received_bytes=trace.boundary.n_bytes if keeps_received else 0,
    )
