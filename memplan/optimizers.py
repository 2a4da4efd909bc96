"""Optimizers: the tensors that each keeps of a weight, in what type and where."""

from typing import Final, Literal, NamedTuple, get_args

Optimizer = Literal[
    "sgd",
    "sgd-momentum",
    "adam",
    "adamw",
    "muon",
    "adamw-8bit",
    "paged-adamw-8bit",
    "paged-adamw-32bit",
    "adamw-32bit",
    "lion-8bit",
    "lion-32bit",
    "paged-lion-8bit",
    "paged-lion-32bit",
]

OPTIMIZERS: Final[tuple[str, ...]] = get_args(Optimizer)


class Kept(NamedTuple):
    """What an optimizer keeps of each weight.

    Attributes:
        moments: the tensors, as its code names them.
        others: AdamW's tensors for the weights that Muon does not update, all but the blocks' matrices.
            None: one optimizer updates all weights.
        bits: of an element of them, by bitsandbytes; None: by PyTorch, in the weight's type.
        paged: large ones are in memory that CUDA moves between GPU and host.
    """

    moments: tuple[str, ...] = ()
    others: tuple[str, ...] | None = None
    bits: Literal[8, 32] | None = None
    paged: bool = False

    @property
    def least_share(self) -> float:
        """Bytes on the GPU for each byte of weights of 32 bits or fewer, at least."""
        if self.bits is None:
            return len(self.moments)
        return 0.0 if self.paged else len(self.moments) * self.bits / 32


ADAM: Final = ("exp_avg", "exp_avg_sq")
TWO_STATES: Final = ("state1", "state2")

KEPT: Final[dict[str, Kept]] = {
    "sgd": Kept(),
    "sgd-momentum": Kept(("momentum",)),
    "adam": Kept(ADAM),
    "adamw": Kept(ADAM),
    "muon": Kept(("momentum_buffer",), others=ADAM),
    "adamw-8bit": Kept(TWO_STATES, bits=8),
    "paged-adamw-8bit": Kept(TWO_STATES, bits=8, paged=True),
    "paged-adamw-32bit": Kept(TWO_STATES, bits=32, paged=True),
    "adamw-32bit": Kept(TWO_STATES, bits=32),
    "lion-8bit": Kept(TWO_STATES[:1], bits=8),
    "lion-32bit": Kept(TWO_STATES[:1], bits=32),
    "paged-lion-8bit": Kept(TWO_STATES[:1], bits=8, paged=True),
    "paged-lion-32bit": Kept(TWO_STATES[:1], bits=32, paged=True),
}
"""By the optimizer's name."""

OF_TORCH: Final = tuple([name for name, kept in KEPT.items() if kept.bits is None and kept.others is None])
"""PyTorch's own that update every weight."""

OF_BITSANDBYTES: Final = tuple([name for name, kept in KEPT.items() if kept.bits is not None])

LEAST_OF_8_BITS: Final = 4096
"""Elements of the smallest weight whose state is of eight bits (`min_8bit_size`)."""

LEAST_PAGED: Final = 100_000
"""Elements of the smallest weight whose state is paged (`get_state_buffer`)."""

SCALED: Final = 256
"""Elements that share a scale (`blocksize`)."""

MAP: Final = 256
"""Values of a map of eight bits, one for each moment, of all weights (`fill_qmap`)."""
