"""Optimizers: the tensors that each keeps of a weight, in what type and where."""

from typing import Final, Literal, NamedTuple, get_args

Optimizer = Literal[
    "sgd",
    "sgd-momentum",
    "adam",
    "adamw",
    "muon",
    "adafactor",
    "adafactor-transformers",
    "rmsprop",
    "adagrad",
    "nadam",
    "radam",
    "adamax",
    "adamw-8bit-torchao",
    "adamw-4bit-torchao",
    "adamw-fp8-torchao",
    "adamw-torchao",
    "adamw-offload-torchao",
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
        code: its class, as `module:name`.
        moments: the state's tensors, as its code names them.
        factored: the names of Adafactor's row and column averages, which replace `moments` for weights with
            two dimensions or more.
        scalars: its float32 scalars, on the host unless the update is fused.
        device_scalars: its float32 scalars that are where the weight is.
        others: AdamW's tensors for the weights that Muon does not update, all but the blocks' matrices.
            None: one optimizer updates all weights.
        bits: the bits of an element of the state; None: as many as the weight's.
        paged: large tensors of the state are in memory that CUDA moves between GPU and host.
        made_with_it: the state is made by the constructor, not by the first step.
        on_host: weights of `LEAST_OFFLOADED` elements or more are updated on the host, which has their state.
    """

    code: str
    moments: tuple[str, ...] = ()
    factored: tuple[str, str] | None = None
    scalars: tuple[str, ...] = ()
    device_scalars: tuple[str, ...] = ()
    others: tuple[str, ...] | None = None
    bits: Literal[4, 8, 32] | None = None
    paged: bool = False
    made_with_it: bool = False
    on_host: bool = False

    @property
    def package(self) -> str:
        """The package that it is of: "torch", "torchao", "transformers" or "bitsandbytes"."""
        return self.code.partition(".")[0]

    @property
    def makes_states_in_turn(self) -> bool:
        """Whether the first step makes each weight's state just before it updates that weight."""
        return self.package == "torchao" and not self.on_host

    @property
    def whose(self) -> str:
        """The words for it in errors."""
        return f"{self.package}' optimizers" if self.package != "torch" else self.code.replace(":", ".")

    @property
    def least_share(self) -> float:
        """Bytes on the GPU for each byte of weights of 32 bits or fewer, at least."""
        if self.paged or self.on_host or self.factored is not None:
            return 0.0
        return len(self.moments) * (1 if self.bits is None else self.bits / 32)


ADAM: Final = ("exp_avg", "exp_avg_sq")
STEP: Final = ("step",)
TWO_STATES: Final = ("state1", "state2")

KEPT: Final[dict[str, Kept]] = {
    "sgd": Kept("torch.optim:SGD"),
    "sgd-momentum": Kept("torch.optim:SGD", ("momentum",)),
    "adam": Kept("torch.optim:Adam", ADAM, scalars=STEP),
    "adamw": Kept("torch.optim:AdamW", ADAM, scalars=STEP),
    "muon": Kept("torch.optim:Muon", ("momentum_buffer",), others=ADAM),
    "adafactor": Kept("torch.optim:Adafactor", ("variance",), ("row_var", "col_var"), STEP),
    "adafactor-transformers": Kept(
        "transformers.optimization:Adafactor",
        ("exp_avg_sq",),
        ("exp_avg_sq_row", "exp_avg_sq_col"),
        device_scalars=("RMS",),
        bits=32,
    ),
    "rmsprop": Kept("torch.optim:RMSprop", ("square_avg",), scalars=STEP),
    "adagrad": Kept("torch.optim:Adagrad", ("sum",), scalars=STEP, made_with_it=True),
    "nadam": Kept("torch.optim:NAdam", ADAM, scalars=(*STEP, "mu_product")),
    "radam": Kept("torch.optim:RAdam", ADAM, scalars=STEP),
    "adamax": Kept("torch.optim:Adamax", ("exp_avg", "exp_inf"), scalars=STEP),
    "adamw-8bit-torchao": Kept("torchao.optim:AdamW8bit", ADAM, scalars=STEP, bits=8),
    "adamw-4bit-torchao": Kept("torchao.optim:AdamW4bit", ADAM, scalars=STEP, bits=4),
    "adamw-fp8-torchao": Kept("torchao.optim:AdamWFp8", ADAM, scalars=STEP, bits=8),
    "adamw-torchao": Kept("torchao.optim.adam:_AdamW", ADAM, scalars=STEP),
    "adamw-offload-torchao": Kept("torchao.optim:CPUOffloadOptimizer", ADAM, scalars=STEP, on_host=True),
    "adamw-8bit": Kept("bitsandbytes.optim:AdamW8bit", TWO_STATES, bits=8),
    "paged-adamw-8bit": Kept("bitsandbytes.optim:PagedAdamW8bit", TWO_STATES, bits=8, paged=True),
    "paged-adamw-32bit": Kept("bitsandbytes.optim:PagedAdamW32bit", TWO_STATES, bits=32, paged=True),
    "adamw-32bit": Kept("bitsandbytes.optim:AdamW32bit", TWO_STATES, bits=32),
    "lion-8bit": Kept("bitsandbytes.optim:Lion8bit", TWO_STATES[:1], bits=8),
    "lion-32bit": Kept("bitsandbytes.optim:Lion32bit", TWO_STATES[:1], bits=32),
    "paged-lion-8bit": Kept("bitsandbytes.optim:PagedLion8bit", TWO_STATES[:1], bits=8, paged=True),
    "paged-lion-32bit": Kept("bitsandbytes.optim:PagedLion32bit", TWO_STATES[:1], bits=32, paged=True),
}
"""By the optimizer's name."""

COMMON: Final = ("sgd", "sgd-momentum", "adam", "adamw")
"""Those that every engine has rules for."""

OF_BITSANDBYTES: Final = tuple([name for name, kept in KEPT.items() if kept.package == "bitsandbytes"])

OF_TORCHAO: Final = tuple([name for name, kept in KEPT.items() if kept.package == "torchao"])

LEAST_OF_8_BITS: Final = 4096
"""Elements of the smallest weight whose state is of few bits (bitsandbytes' `min_8bit_size`)."""

LEAST_OFFLOADED: Final = 4096
"""Elements of the smallest weight that is updated on the host (`CPUOffloadOptimizer`'s `minimal_size`)."""

LEAST_PAGED: Final = 100_000
"""Elements of the smallest weight whose state is paged (`get_state_buffer`)."""

SCALED: Final = 256
"""Elements that share a scale (`blocksize`)."""

MAP: Final = 256
"""Values of a map of eight bits, one for each moment, of all weights (`fill_qmap`)."""
