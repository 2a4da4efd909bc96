"""What the optimizer's step adds while it runs."""

from memplan.engines.torch.stage import MOMENTS, Stage
from memplan.shapes import Buffer, Event, buffer_of
from memplan.timeline import Stretch, allocs, events, frees


def update(stage: Stage) -> Stretch:
    """The optimizer's temporaries: Adam's denominator and its square root, one parameter at a time.

    The last parameter's denominator lives until the next one's is made.

    Source: torch/optim/adam.py (`_single_tensor_adam`).
    """
    if len(MOMENTS[stage.plan.optimizer]) < 2:
        return events("optimizer step", _cut_grads(stage))
    if stage.device == "cuda":
        return events("optimizer step", _foreach(stage))
    found: list[Event] = []
    before: Buffer | None = None
    for name, elements in _update_sizes(stage):
        root = buffer_of(f"{name} (square root)", (elements,), stage.weight_dtype)
        denominator = buffer_of(f"{name} (denominator)", (elements,), stage.weight_dtype)
        found += allocs(root, denominator)
        found += frees(root) if before is None else frees(root, before)
        before = denominator
    if before is not None:
        found += frees(before)
    return events("optimizer step", found)


def _cut_grads(stage: Stage) -> list[Event]:
    """A gradient that is whole beside a divided weight is cut while the optimizer reads it."""
    found: list[Event] = []
    for parameter in () if stage.fsdp else stage.ends:
        if parameter.grad_shape != parameter.shape:
            part = buffer_of(f"{parameter.name}.grad (own rows)", parameter.shape, stage.weight_dtype)
            found += [*allocs(part), *frees(part)]
    return found


def _update_sizes(stage: Stage) -> list[tuple[str, int]]:
    if stage.owned is not None:
        return [(p.name, p.n_elements) for p in stage.owned]
    block = [(p.name, stage.weight_elements(p)) for p in stage.trace.block_parameters]
    embed = [(p.name, stage.weight_elements(p)) for p in stage.trace.embed_parameters]
    head = [(p.name, stage.weight_elements(p)) for p in stage.trace.head_parameters]
    return embed + block * min(stage.n_blocks, 2) + head


def _foreach(stage: Stage) -> list[Event]:
    """torch/optim/adam.py (`_multi_tensor_adam`): the square roots of all parameters at once."""
    every = sum(n * stage.weight_elements(p) for p, n in stage.counted_parameters())
    if stage.owned is not None:
        every = sum(p.n_elements for p in stage.owned)
    roots = buffer_of("square roots of all second moments", (every,), stage.weight_dtype)
    return [*allocs(roots), *frees(roots)]
