"""Shapes, element types, tensors as the ledger shows them, and parameters."""

from collections.abc import Mapping
from enum import Enum
from typing import Final, Literal, NamedTuple

from memplan.errors import InvalidValue
from memplan.placements import Partial, Placements, Shard, local_shape

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
INT16: Final = DType("int16", 2)
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
    """Raise for operands that differ where an operation needs equal ones.

    Raises:
        InvalidValue: with both values.
    """
    if left != right:
        raise InvalidValue(
            f"{what} of {left} and {right} has no rule: nothing is broadcast or promoted; make both equal."
        )


class Role(Enum):
    """The role of a buffer that code depends on; its name is only for people."""

    TENSOR = "tensor"
    RNG_STATE = "state of the random number generator"
    SAVED_ON_CPU = "copy of a block's argument that a checkpoint keeps on the host"
    FROM_HOST = "copy of a saved tensor that comes back from the host"
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
    """A weight as one rank holds it, before any data-parallel sharding.

    `placements`: by mesh axis; a weight that has some is a DTensor. `grad_placements`: of its gradient as the
    backward pass makes it. `shape`, `n_elements` and `n_bytes` are local; `partial_grad` is this rank's term
    of a gradient that is still to be summed over ranks. A parameter that does not require a gradient is
    frozen: it has neither gradient nor optimizer state. `held`: the narrow type of floats that a frozen one
    has where the others are stored in float32; None: no other type. `gathered_as`: the type in which FSDP2's
    extensions gather it; None: the precision's.
    """

    def __init__(
        self,
        name: str,
        whole_shape: Shape,
        dtype: DType,
        *,
        placements: Placements | None = None,
        grad_placements: Placements | None = None,
        mesh: Mapping[str, int] | None = None,
        requires_grad: bool = True,
        held: DType | None = None,
        gathered_as: DType | None = None,
    ) -> None:
        self.name = name
        self.held, self.gathered_as = held, gathered_as
        self.dtype = dtype
        self.requires_grad = requires_grad
        self.whole_shape, self.mesh = whole_shape, mesh or {}
        self.placements = placements or {}
        self.grad_placements = grad_placements or self.placements
        self.shape = local_shape(whole_shape, self.placements, self.mesh)
        self.n_elements = n_elements(self.shape)
        self.n_bytes = self.n_elements * dtype.itemsize
        self.partial_grad = buffer_of(f"{name}.grad (partial)", self.shape, dtype, "grads")

    @property
    def grad_shape(self) -> Shape:
        """The local shape of its gradient as the backward pass makes it."""
        return local_shape(self.whole_shape, self.grad_placements, self.mesh)

    @property
    def is_floating_point(self) -> bool:
        """Whether it is of floats."""
        return "float" in self.dtype.name

    @property
    def is_dtensor(self) -> bool:
        """Whether it is a DTensor."""
        return bool(self.placements)

    @property
    def is_of_experts(self) -> bool:
        """Whether expert-parallel ranks hold different parts of it."""
        return "ep" in self.placements

    @property
    def is_divided(self) -> bool:
        """Whether it is sharded over a mesh axis."""
        return any(isinstance(placement, Shard) for placement in self.placements.values())

    @property
    def has_partial_grad(self) -> bool:
        """Whether its gradient is partial: each rank has a term of the sum."""
        return Partial() in self.grad_placements.values()
