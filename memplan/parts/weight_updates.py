"""What an optimizer keeps of a weight, and what it allocates to update weights, one by one or as lists."""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Final, NamedTuple

from memplan.device import Device
from memplan.kernels import norm_scratch, reduction_scratch
from memplan.optimizers import KEPT, LEAST_OF_8_BITS, LEAST_PAGED, MAP, OF_TORCHAO, SCALED, Kept
from memplan.record import Event, allocs, frees
from memplan.shapes import BF16, FP32, INT64, UINT8, Buffer, DType, Shape, buffer_of


class Weight(NamedTuple):
    """A weight as its optimizer has it, `times` times."""

    name: str
    shape: Shape
    dtype: DType
    times: int = 1

    @property
    def is_factored(self) -> bool:
        """Whether Adafactor keeps a row and a column of its second moment."""
        return len(self.shape) > 1

    @property
    def row(self) -> Shape:
        """The shape of a number for each row."""
        return *self.shape[:-1], 1

    @property
    def column(self) -> Shape:
        """The shape of a number for each column."""
        return *self.shape[:-2], 1, self.shape[-1]

    def buffer(self, what: str, shape: Shape | None = None, dtype: DType | None = None) -> Buffer:
        """One buffer for a temporary of all `times` weights, by default of the weight's shape and dtype."""
        whole = self.shape if shape is None else shape
        return buffer_of(f"{self.name} ({what})", (self.times, *whole), dtype or self.dtype)


def states_of(kept: Kept, weight: Weight, *, on_host: bool) -> list[Buffer]:
    """The optimizer's tensors of a weight where it is, as they are made.

    Those of dims have the weight's type, 32 bits, or bitsandbytes' eight with a scale for each block of them.
    `on_host`: scalars are not where the weight is.

    Source: bitsandbytes/optim/optimizer.py (`Optimizer2State.init_state`, `get_state_buffer`), 0.50;
    `torch.optim.adam:Adam._init_group`, `torch.optim._adafactor:Adafactor._init_group`;
    transformers.optimization (`Adafactor.step`).
    """
    if kept.package == "torchao":
        scalars = scalars_of([] if on_host else kept.scalars, weight.name)
        return [*scalars, *[one for name in kept.moments for one in _of_torchao(kept, weight, name)]]
    n = prod(weight.shape)
    narrow = is_of_8_bits(kept, n)
    dtype = UINT8 if narrow else weight.dtype if kept.bits is None else FP32
    named = [(name, weight.shape) for name in kept.moments]
    if kept.factored is not None and weight.is_factored:
        named = list(zip(kept.factored, (weight.row, weight.column), strict=True))
    found = [] if on_host else scalars_of(kept.scalars, weight.name)
    found += scalars_of(kept.device_scalars, weight.name)
    if not kept.paged or n < LEAST_PAGED:
        found += [buffer_of(f"{weight.name}.{name}", shape, dtype, "optimizer") for name, shape in named]
    for i in range(1, narrow * len(named) + 1):
        found.append(buffer_of(f"{weight.name}.absmax{i}", (-(-n // SCALED),), FP32, "optimizer"))
    return found


def states_of_own_optimizer(kept: Kept, weight: Weight, *, on_host: bool) -> list[Buffer]:
    """The tensors of an optimizer that updates this weight alone, with maps of its own."""
    maps = maps_of(kept) if is_of_8_bits(kept, prod(weight.shape)) else []
    return [*maps, *states_of(kept, weight, on_host=on_host)]


def state_bytes(kept: Kept, weight: Weight, *, on_host: bool) -> int:
    """The bytes of `states_of`, in closed form where all moments have the weight's shape and type."""
    if kept.package != "torch" or kept.factored is not None:
        return sum([one.n_bytes for one in states_of(kept, weight, on_host=on_host)])
    n_scalars = len(kept.device_scalars) + (0 if on_host else len(kept.scalars))
    return len(kept.moments) * prod(weight.shape) * weight.dtype.itemsize + n_scalars * FP32.itemsize


def _of_torchao(kept: Kept, weight: Weight, moment: str) -> Iterator[Buffer]:
    """A moment by torchao: codes, a scale for each block of them, and the values that codes stand for.

    Source: torchao/optim/adam.py (`_AdamBase._new_buffer`), subclass_8bit.py, subclass_4bit.py and
    subclass_fp8.py (`zeros`), 0.18.
    """
    name, n = f"{weight.name}.{moment}", prod(weight.shape)
    block = blocks_of_torchao(kept, n)
    if kept.bits is None or not block:
        yield buffer_of(name, weight.shape, weight.dtype, "optimizer")
        return
    yield buffer_of(f"{name}.codes", (n * kept.bits // 8,), UINT8, "optimizer")
    yield buffer_of(f"{name}.scale", (n // block,), FP32, "optimizer")
    if not is_fp8(kept):
        yield buffer_of(f"{name}.qmap", (2**kept.bits,), FP32, "optimizer")


def is_fp8(kept: Kept) -> bool:
    """Whether the quantized state is in float8, so that it needs no table of values (`qmap`)."""
    return kept.code.endswith("Fp8")


def blocks_of_torchao(kept: Kept, n_elements: int) -> int:
    """The block size of a quantized moment of this many elements; 0: the moment is not quantized."""
    block = 128 if kept.bits == 4 else 256
    narrow = kept.bits is not None and n_elements >= LEAST_OF_8_BITS and n_elements % block == 0
    return block if narrow else 0


def scalars_of(scalars: Iterable[str], weight: str) -> list[Buffer]:
    """An optimizer's scalars of a weight, by name."""
    return [buffer_of(f"{weight}.{name}", (), FP32, "optimizer") for name in scalars]


def maps_of(kept: Kept) -> list[Buffer]:
    """The values that eight bits stand for: a map for each moment, of all weights of an optimizer."""
    return [buffer_of(f"map of {name}", (MAP,), FP32, "optimizer") for name in kept.moments]


def is_of_8_bits(kept: Kept, n_elements: int) -> bool:
    """Whether bitsandbytes keeps the state of a weight in eight bits."""
    return kept.package == "bitsandbytes" and kept.bits == 8 and n_elements >= LEAST_OF_8_BITS


class Variables:
    """The tensors that variables of a loop over weights hold: each lives until its variable has another.

    A weight that is met again has the same buffers.
    """

    def __init__(self) -> None:
        self._held: dict[str, Buffer] = {}
        self._made: dict[tuple[Weight, str], Buffer] = {}

    def bind(
        self,
        variable: str,
        weight: Weight,
        what: str,
        shape: Shape | None = None,
        dtype: DType | None = None,
        *,
        beside: Sequence[Buffer] = (),
        scratch: Sequence[Buffer] = (),
    ) -> Iterator[Event]:
        """Assign a new tensor to a Python variable of the loop.

        `beside` and `scratch` are freed once the tensor is computed, then the variable's old tensor is.
        `beside`: the temporaries that the tensor is computed from. `scratch`: its kernel's workspace.
        """
        if (weight, what) not in self._made:
            self._made[weight, what] = weight.buffer(what, shape, dtype)
        made = self._made[weight, what]
        yield from (*allocs(*beside, made, *scratch), *frees(*scratch, *beside), *self.unbind(variable))
        self._held[variable] = made

    def unbind(self, *variables: str) -> Iterator[Event]:
        """The variables hold no tensor any more."""
        for variable in variables:
            if variable in self._held:
                yield from frees(self._held.pop(variable))

    def end(self) -> Iterator[Event]:
        """The function returns."""
        yield from self.unbind(*list(self._held))


def passing(*buffers: Buffer) -> Sequence[Event]:
    """Buffers that are made one after the other, and go together."""
    return *allocs(*buffers), *frees(*buffers)


def updated_alone(optimizer: str, weight: Weight, variables: Variables, device: Device) -> Iterator[Event]:
    """A weight's turn in the loop over weights.

    Source: `torch.optim.adam:_single_tensor_adam`, `torch.optim.nadam:_single_tensor_nadam`,
    `torch.optim.radam:_single_tensor_radam`, `torch.optim.adamax:_single_tensor_adamax`,
    `torch.optim.rmsprop:_single_tensor_rmsprop`, `torch.optim.adagrad:_single_tensor_adagrad`.
    """
    match optimizer:
        case "adam" | "adamw" | "muon":
            root = weight.buffer("square root")
            yield from variables.bind("denom", weight, "denominator", beside=[root])
        case "nadam":
            corrected = weight.buffer("corrected second moment")
            yield from variables.bind("denom", weight, "denominator", beside=[corrected])
        case "radam":
            yield from variables.bind("bias_corrected_exp_avg", weight, "corrected first moment")
            scaled, root = weight.buffer("scaled first moment"), weight.buffer("square root")
            inverse, rate = weight.buffer("inverse root"), weight.buffer("adaptive rate")
            product, rectified = weight.buffer("product"), weight.buffer("update")
            yield from (*allocs(scaled, root, inverse, rate), *frees(inverse, root), *allocs(product))
            yield from (*frees(scaled, rate), *allocs(rectified), *frees(product, rectified))
        case "adamax":
            yield from passing(weight.buffer("size of the gradient"))
        case "rmsprop" | "adagrad":
            yield from variables.bind("root", weight, "square root")
        case "adafactor":
            yield from _adafactor(weight, variables, device)
        case "adafactor-transformers":
            yield from _adafactor_of_transformers(weight, variables, device)
        case name if name in OF_TORCHAO:
            yield from _compiled_of_torchao(KEPT[name], weight)


def updated_together(optimizer: str, weights: Sequence[Weight], device: Device) -> Iterator[Event]:
    """The update of a list of weights, whose temporaries are there at once.

    Source: `torch.optim.adam:_multi_tensor_adam`, `torch.optim.nadam:_multi_tensor_nadam`,
    `torch.optim.radam:_multi_tensor_radam`, `torch.optim.adamax:_multi_tensor_adamax`,
    `torch.optim.rmsprop:_multi_tensor_rmsprop`, `torch.optim.adagrad:_multi_tensor_adagrad`.
    """
    match optimizer:
        case "adam" | "adamw" | "muon" | "nadam" | "radam" | "rmsprop":
            yield from passing(*[one.buffer("square root") for one in weights])
        case "adamax":
            yield from passing(*[one.buffer("size of the gradient") for one in weights])
        case "adagrad":
            roots = [one.buffer("square root") for one in weights]
            yield from passing(*roots, *[one.buffer("scaled gradient") for one in weights])
        case "adafactor":
            yield from _adafactor_of_lists(weights, device)


def default_update(optimizer: str, weights: Sequence[Weight], device: Device) -> Iterator[Event]:
    """The update by PyTorch's default implementation: one weight after the other on CPU, foreach on a GPU."""
    if not device.on_cpu:
        yield from updated_together(optimizer, weights, device)
        return
    variables = Variables()
    for weight in weights:
        yield from updated_alone(optimizer, weight, variables, device)
    yield from variables.end()


def _scratch_of_columns(device: Device, weight: Weight) -> list[Buffer]:
    """What the kernel takes that sums a matrix's columns."""
    rows, columns = weight.shape[-2:]
    found = reduction_scratch(device, columns, rows) if not device.on_cpu else None
    sizes = () if found is None else (found.sums_bytes, found.counters_bytes)
    return [Buffer(f"{weight.name} (sums of columns)", (), FP32, n_bytes, "temporaries") for n_bytes in sizes]


def _norm(device: Device, weight: Weight, of: str, dtype: DType | None = None) -> Sequence[Event]:
    """A tensor's norm, which the host reads."""
    norm = weight.buffer(f"norm of the {of}", (), dtype)
    scratch = [
        Buffer(f"{weight.name} (sums of squares)", (), FP32, n_bytes, "temporaries")
        for n_bytes in norm_scratch(device, prod(weight.shape), itemsize=FP32.itemsize)
    ]
    return *allocs(norm, *scratch), *frees(*scratch, norm)


def _adafactor(weight: Weight, variables: Variables, device: Device) -> Iterator[Event]:
    """A weight's turn in the loop; its update lives until the next weight's is estimated.

    Source: `torch.optim._adafactor:_single_tensor_adafactor`.
    """
    yield from _norm(device, weight, "weight")
    if weight.is_factored:
        scratch = _scratch_of_columns(device, weight)
        yield from variables.bind("row_mean", weight, "mean of rows", weight.row)
        yield from variables.bind("col_mean", weight, "mean of columns", weight.column, scratch=scratch)
    else:
        yield from variables.bind("grad_squared", weight, "squared gradient")
    yield from variables.bind("update", weight, "update")
    yield from _norm(device, weight, "update")


def _adafactor_of_lists(weights: Sequence[Weight], device: Device) -> Iterator[Event]:
    """Matrices and vectors are lists of their own; the first one's updates live until the other's are made.

    Source: `torch.optim._adafactor:_multi_tensor_adafactor`.
    """
    before: list[Buffer] = []
    for is_factored in dict.fromkeys([one.is_factored for one in weights]):
        own = [one for one in weights if one.is_factored is is_factored]
        for one in own:
            yield from _norm(device, one, "weight")
        if is_factored:
            yield from passing(*[one.buffer("mean of rows", one.row) for one in own])
            columns = [(one.buffer("mean of columns", one.column), one) for one in own]
            for mean, one in columns:
                yield from (*allocs(mean), *passing(*_scratch_of_columns(device, one)))
            yield from frees(*[mean for mean, _ in columns])
        else:
            yield from passing(*[one.buffer("squared gradient") for one in own])
        updates = [one.buffer("update") for one in own]
        yield from (*allocs(*updates), *frees(*before))
        for one in own:
            yield from _norm(device, one, "update")
        before = updates
    yield from frees(*before)


def _adafactor_of_transformers(weight: Weight, variables: Variables, device: Device) -> Iterator[Event]:
    """A weight's turn: it and its gradient as float32, if they are narrower, and its update.

    Source: transformers.optimization (`Adafactor.step`), as the Trainer calls it: with a learning rate, no
    scaling by the weight's size.
    """
    copies = weight.dtype != FP32
    yield from variables.unbind("grad")
    if copies:
        yield from variables.bind("grad", weight, "gradient in float32", dtype=FP32)
    yield from variables.unbind("p_data_fp32")
    if copies:
        yield from variables.bind("p_data_fp32", weight, "in float32", dtype=FP32)
    yield from _norm(device, weight, "weight", FP32)
    square = weight.buffer("squared gradient", dtype=FP32)
    yield from variables.bind("update", weight, "squared gradient and epsilon", dtype=FP32, beside=[square])
    if weight.is_factored:
        rows, columns = weight.shape[:-1], weight.column
        yield from passing(weight.buffer("mean of rows", rows, FP32))
        means = weight.buffer("mean of columns", columns, FP32)
        yield from passing(means, *_scratch_of_columns(device, weight))
        of_rows = weight.buffer("factor of rows", rows, FP32)
        of_columns = weight.buffer("factor of columns", columns, FP32)
        yield from variables.bind("update", weight, "update", dtype=FP32, beside=[of_rows, of_columns])
    else:
        yield from variables.bind("update", weight, "update", dtype=FP32)
    yield from _norm(device, weight, "update", FP32)
    yield from passing(weight.buffer("negative update", dtype=FP32))


def _compiled_of_torchao(kept: Kept, weight: Weight) -> Iterator[Event]:
    """What Inductor's kernels of an update leave in memory on a GPU, of torch 2.13: the two moments' scales.

    Beside them in 8 bits both moments in float32, in 4 bits their codes as INT64 too: these are looked up
    after the scales of all blocks are known. Rounding at random takes a seed.

    Source: torchao/optim/adam.py (`single_param_adam`), quant_utils.py (`quantize_8bit_with_qmap`,
    `quantize_4bit_with_qmap`), 0.18.
    """
    if kept.bits is None:
        if weight.dtype == BF16:
            yield from passing(weight.buffer("seed", (), INT64))
        return
    n = prod(weight.shape)
    block = blocks_of_torchao(kept, n)
    if n <= LEAST_OF_8_BITS or not block:
        return
    scales = [weight.buffer(f"scales of the {which} moment", (n // block,), FP32) for which in ORDER]
    wide = [] if is_fp8(kept) else [weight.buffer(f"{which} moment", dtype=FP32) for which in ORDER]
    codes = [weight.buffer(f"codes of the {which} moment", dtype=INT64) for which in ORDER]
    yield from passing(*scales, *wide, *(codes if kept.bits == 4 else ()))


ORDER: Final = ("first", "second")
