"""Shapes, element types, tensors as the ledger shows them, and parameters."""

from enum import Enum
from typing import Final, Literal, NamedTuple

from memplan.errors import InvalidValue

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


def check_equal(what: str, left: object, right: object) -> None:
    """Refuse operands that differ where an operation needs equal ones.

    Raises:
        InvalidValue: with both values.
    """
    if left != right:
        raise InvalidValue(
            f"{what} of {left} and {right} has no rule: nothing is broadcast or promoted; make both equal."
        )


class Role(Enum):
    """What a buffer is to the code; its name is for people to read."""

    TENSOR = "tensor"
    RNG_STATE = "state of the random number generator"
    BIASED_PRODUCT = "result of a matrix product with a bias"


class Buffer:
    """One allocation, as the ledger shows it; `kind` becomes "activations" once the tensor is saved."""

    __slots__ = ("dtype", "kind", "n_bytes", "name", "role", "shape")

    def __init__(self, name: str, shape: Shape, dtype: DType, n_bytes: int, kind: Kind) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.n_bytes = n_bytes
        self.kind = kind
        self.role = Role.TENSOR

    def __repr__(self) -> str:
        return f"{self.name} {self.shape} {self.dtype.name} {self.n_bytes} B ({self.kind})"


def buffer_of(name: str, shape: Shape, dtype: DType, kind: Kind = "temporaries") -> Buffer:
    """A buffer of exactly its elements' bytes."""
    return Buffer(name, shape, dtype, n_elements(shape) * dtype.itemsize, kind)


class Parameter:
    """A weight as one tensor rank holds it.

    `shape` is already divided over the tensor axis along `tp_dim` (None: whole on every rank); `grad_shape`
    is its gradient's, which PyTorch does not always divide. `n_elements` and `n_bytes` are of `shape`, before
    any data-parallel sharding. `summed_over_tp` marks a whole weight whose gradients must be summed over the
    tensor ranks, each of which has a part of the sequence. `distributed`: it is a DTensor, as all divided and
    all summed weights are, and a few others.
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
