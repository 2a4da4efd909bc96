"""What PyTorch's Adam allocates for an update: for one parameter at a time, or for all at once."""

from collections.abc import Iterable, Iterator, Sequence

from memplan.device import Device
from memplan.record import Event, allocs, frees
from memplan.shapes import Buffer, DType, buffer_of


def root_and_denominator(name: str, n_elements: int, dtype: DType) -> tuple[Buffer, Buffer]:
    """The square root of a parameter's second moment, and the denominator that is made of it."""
    of_both = [f"{name} ({what})" for what in ("square root", "denominator")]
    root, denominator = (buffer_of(one, (n_elements,), dtype) for one in of_both)
    return root, denominator


def updated(root: Buffer, denominator: Buffer, before: Buffer | None) -> Sequence[Event]:
    """A parameter's turn in the for-loop; the denominator `before` lives until this one is there.

    Source: `torch.optim.adam:_single_tensor_adam`.
    """
    return *allocs(root, denominator), *frees(root), *(() if before is None else frees(before))


def updated_at_once(sizes: Iterable[tuple[str, int]], dtype: DType) -> Sequence[Event]:
    """The foreach update of parameters, by name and number of elements: all square roots at once.

    Source: `torch.optim.adam:_multi_tensor_adam`.
    """
    made = [buffer_of(f"{name} (square root)", (n_elements,), dtype) for name, n_elements in sizes]
    return *allocs(*made), *frees(*made)


def default_update(device: Device, sizes: Iterable[tuple[str, int]], dtype: DType) -> Iterator[Event]:
    """The update by Adam's default implementation: the for-loop on CPU, foreach on a GPU."""
    if not device.on_cpu:
        yield from updated_at_once(sizes, dtype)
        return
    before: Buffer | None = None
    for name, n_elements in sizes:
        root, denominator = root_and_denominator(name, n_elements, dtype)
        yield from updated(root, denominator, before)
        before = denominator
    yield from frees(*[] if before is None else [before])
