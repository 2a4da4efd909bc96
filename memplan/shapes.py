"""Shapes, element types, tensors as the ledger shows them, and parameters."""

from typing import Final, Literal, NamedTuple

Kind = Literal["weights", "grads", "optimizer", "activations", "temporaries"]
KINDS: Final[tuple[Kind, ...]] = ("weights", "grads", "optimizer", "activations", "temporaries")

Shape = tuple[int, ...]


class DType(NamedTuple):
    """An element type: its torch name and its bytes."""

    name: str
    itemsize: int


FP32: Final = DType("float32", 4)
FP64: Final = DType("float64", 8)
BF16: Final = DType("bfloat16", 2)
FP16: Final = DType("float16", 2)
BOOL: Final = DType("bool", 1)
UINT8: Final = DType("uint8", 1)
INT32: Final = DType("int32", 4)
INT64: Final = DType("int64", 8)
COMPLEX64: Final = DType("complex64", 8)


def n_elements(shape: Shape) -> int:
    """Elements of a shape.

    >>> n_elements((2, 3, 4)), n_elements(())
    (24, 1)
    """
    n = 1
    for dim in shape:
        n *= dim
    return n


class Buffer:
    """The record of one allocation, as the ledger shows it. `kind` becomes "activations" once saved."""

    __slots__ = ("dtype", "kind", "n_bytes", "name", "shape")

    def __init__(self, name: str, shape: Shape, dtype: DType, n_bytes: int, kind: Kind) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.n_bytes = n_bytes
        self.kind = kind

    def __repr__(self) -> str:
        return f"{self.name} {self.shape} {self.dtype.name} {self.n_bytes} B ({self.kind})"


def buffer_of(name: str, shape: Shape, dtype: DType, kind: Kind = "temporaries") -> Buffer:
    """The record of a tensor that takes its elements' bytes and no more."""
    return Buffer(name, shape, dtype, n_elements(shape) * dtype.itemsize, kind)


class Parameter:
    """A weight as one tensor rank holds it.

    `shape` is already divided over the tensor axis along `tp_dim` (None: whole on every rank); `grad_shape`
    is its gradient's, which PyTorch does not always divide. `n_elements` and `n_bytes` are of `shape`, before
    any data-parallel sharding.
    `summed_over_tp` marks a whole weight whose gradient each tensor rank knows only a part of, because the
    sequence is divided over them. Both kinds are DTensors (`distributed`), and so are a few others.
    """

    __slots__ = (
        "distributed",
        "dtype",
        "grad_shape",
        "n_bytes",
        "n_elements",
        "name",
        "shape",
        "summed_over_tp",
        "tp_dim",
    )

    def __init__(
        self,
        name: str,
        shape: Shape,
        dtype: DType,
        *,
        tp_dim: int | None = None,
        summed_over_tp: bool = False,
        distributed: bool = False,
    ) -> None:
        self.name = name
        self.shape = shape
        self.grad_shape = shape
        self.dtype = dtype
        self.n_elements = n_elements(shape)
        self.n_bytes = self.n_elements * dtype.itemsize
        self.tp_dim = tp_dim
        self.summed_over_tp = summed_over_tp
        self.distributed = distributed or summed_over_tp or tp_dim is not None
