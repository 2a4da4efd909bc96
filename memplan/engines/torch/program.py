"""One rank's steps as the caching allocator sees them: tensor by tensor, each on its stream."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from memplan.allocator import Program
from memplan.engines.torch.fsdp import ShardedPasses
from memplan.engines.torch.optimizer import UPDATE_NAME, update
from memplan.engines.torch.passes import Passes
from memplan.engines.torch.schedules import schedule
from memplan.engines.torch.stage import RankStages, Stage
from memplan.engines.torch.step import passes_of, rest_of
from memplan.plan import SINGLE_STAGE_SCHEDULES
from memplan.shapes import UINT8, Buffer, buffer_of
from memplan.timeline import chain

GATHERS: Final = "all-gather copy-in"
REDUCES: Final = "reduce-scatter"

N_BLAS_THREADS: Final = 2


def program(stages: RankStages, passes: Mapping[Stage, Passes], workspace_bytes: int = 0) -> Program:
    """What the rank allocates and frees, in order; `passes` are those it was estimated with.

    `workspace_bytes`: cuBLAS's, of each of the two threads that call it: the caller's, and autograd's.

    Neglects: cuBLASLt's workspace for products with a bias (1 MiB, where it is not the same one).

    Source: aten/src/ATen/cuda/CublasHandlePool.cpp (`getCurrentCUDABlasHandle`: a pool for each thread).
    """
    own = [passes.get(stage) or passes_of(stage) for stage in stages]
    updates = [] if stages.offloads else [update(stages, one_by_one=True)]
    workspace = buffer_of("cuBLAS workspace", (workspace_bytes,), UINT8)
    return Program(
        at_rest=rest_of(stages, own) + Counter({workspace: N_BLAS_THREADS}),
        step=chain("step", *schedule(stages, own), *updates),
        update_name=UPDATE_NAME,
        streams=dict(_streams(own)),
    )


def _streams(passes: Iterable[Passes]) -> Iterator[tuple[Buffer, str]]:
    """FSDP2's own streams: what an all-gather reads and fills, and what a reduce-scatter leaves.

    Gradients that are to be reduced, and weights, come from the default stream; so does what a schedule
    gathers ahead of time by itself.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (`foreach_all_gather`, `foreach_reduce`),
    _fsdp_param_group.py (`FSDPCommContext.get_all_gather_streams`).
    """
    for one in passes:
        if isinstance(one, ShardedPasses):
            plan = one.stage.plan
            ahead = plan.pp > 1 and plan.schedule not in SINGLE_STAGE_SCHEDULES
            for unit, _ in one.units:
                for buffer in (unit.reduced, unit.passing):
                    yield buffer, REDUCES
                for buffer in () if ahead else unit.gathering():
                    yield buffer, GATHERS
