"""Adapters: what is trained beside a model's frozen weights, as PEFT's LoRA does it."""

from typing import Final, Literal, NamedTuple, get_args

Quantized = Literal["none", "nf4", "nf4-double", "int8"]
"""How frozen weights of linears are held."""

QUANTIZED: Final[tuple[str, ...]] = get_args(Quantized)

ADAPTERS: Final = "adapters"
"""The key beside a config.json's own under which a trace's adapters are."""

ALL_LINEAR: Final = "all-linear"
"""PEFT's word for all linears but the head."""


class Adapters(NamedTuple):
    """LoRA's adapters: their rank, the modules that have them, and how the frozen weights are held.

    `targets`, `saved`: names with commas between them. `saved` modules are trained whole. rsLoRA and alpha
    scale what the adapters give, and change no byte.
    """

    rank: int
    targets: str = ALL_LINEAR
    dropout: float = 0.0
    dora: bool = False
    saved: str = ""
    quantize: str = "none"
