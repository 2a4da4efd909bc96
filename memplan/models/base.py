"""The base of all models: sizes, and a forward pass over shapes in three parts."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Final

from memplan.checks import checked_count, checked_flag, checked_fraction
from memplan.errors import InvalidValue, divisors_text, shown_value
from memplan.shapes import COMPLEX64, INT64, Buffer, buffer_of
from memplan.tape import Tensor

MOST_LAYERS: Final = 10_000
"""More are taken for a mistake: the deepest trained model has 1,000 (Wang et al. 2022, arXiv:2203.00555)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(ABC):
    """A decoder-only transformer of `n_layers` equal blocks.

    Sizes are counts: `d_model` is the width of the residual stream, `d_ff` of the feed-forward layer,
    `d_head` of one attention head (0: d_model / n_heads), `n_kv_heads` the key and value heads (0: n_heads).
    Subclasses write the forward pass: `embed`, one `block`, `head`. Frozen: change a field with
    `dataclasses.replace`.

    Raises:
        InvalidValue: a size that is no positive integer, or sizes that contradict each other.
    """

    learned_positions: ClassVar[bool]
    """Whether there is a table of learned positions, whose length `max_seq_len` no sequence can exceed."""

    name: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int = 0
    d_head: int = 0
    d_ff: int
    vocab_size: int
    max_seq_len: int
    tied_head: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InvalidValue(f"name={shown_value(self.name)} is not allowed; use a text that is not empty.")
        object.__setattr__(self, "n_layers", checked_count("n_layers", self.n_layers, most=MOST_LAYERS))
        for field in ("d_model", "n_heads", "d_ff", "vocab_size", "max_seq_len"):
            object.__setattr__(self, field, checked_count(field, getattr(self, field)))
        for field in ("n_kv_heads", "d_head"):
            object.__setattr__(self, field, checked_count(field, getattr(self, field), least=0))
        if self.d_head == 0:
            _check_divides("n_heads", self.n_heads, "d_model", self.d_model)
            object.__setattr__(self, "d_head", self.d_model // self.n_heads)
        if self.n_kv_heads == 0:
            object.__setattr__(self, "n_kv_heads", self.n_heads)
        _check_divides("n_kv_heads", self.n_kv_heads, "n_heads", self.n_heads)
        checked_flag("tied_head", self.tied_head)
        checked_fraction("dropout", self.dropout)

    @property
    def output_name(self) -> str:
        """The projection to the vocabulary: the token table itself if the head is tied."""
        return "embedding.tokens" if self.tied_head else "head.output"

    def buffers(self, seq_len: int) -> tuple[Buffer, ...]:
        """What a module keeps beside its weights: the angles of rotary positions."""
        if self.learned_positions:
            return ()
        return (buffer_of("rotation", (seq_len, self.d_head // 2), COMPLEX64),)

    def inputs(self, samples: int, seq_len: int) -> tuple[Buffer, ...]:
        """What a step is given for so many samples; the first is the pipeline's first stage's only."""
        return tuple([buffer_of(name, (samples, seq_len), INT64) for name in ("tokens", "targets")])

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids (batch, seq) to the first block's input (batch, seq, d_model)."""

    @abstractmethod
    def block(self, x: Tensor) -> Tensor:
        """One block, (batch, seq, d_model) to the same."""

    @abstractmethod
    def head(self, x: Tensor) -> Tensor:
        """The last block's output to logits (batch, seq, vocab_size)."""


def _check_divides(name: str, value: int, of: str, total: int) -> None:
    if total % value:
        raise InvalidValue(f"{name}={value} does not divide {of}={total}; use one of {divisors_text(total)}.")
