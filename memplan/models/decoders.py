"""The sizes that several implementations of a family share; each implementation has its own forward pass."""

from dataclasses import dataclass
from typing import ClassVar

from memplan.checks import checked_positive
from memplan.errors import InvalidValue
from memplan.models.base import Decoder
from memplan.ops import embedding, rotation
from memplan.shapes import Buffer
from memplan.tape import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryDecoder(Decoder):
    """A decoder with rotary positions: `max_seq_len` is the trained context, not a limit.

    Raises:
        InvalidValue: as `Decoder`; a `rope_theta` that is not positive.
    """

    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        Decoder.__post_init__(self)
        object.__setattr__(self, "rope_theta", checked_positive("rope_theta", self.rope_theta))

    def buffers(self, seq_len: int) -> tuple[Buffer, ...]:
        return (rotation(seq_len, self.d_head),)

    def blocks_called_with(self, seq_len: int) -> tuple[Buffer, ...]:
        return self.buffers(seq_len)

    def embed(self, tokens: Tensor) -> Tensor:
        return embedding(tokens, "embedding.tokens", self.vocab_size, self.d_model)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaDecoder(RotaryDecoder):
    """Llama's sizes: attention and feed-forward layers may have biases."""

    family: ClassVar[str] = "llama"

    attention_bias: bool = False
    mlp_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GptDecoder(Decoder):
    """GPT-2's sizes: learned positions, of which `max_seq_len` are trained; as many key heads as query heads.

    Raises:
        InvalidValue: as `Decoder`; heads that are not as wide together as the model.
    """

    family: ClassVar[str] = "gpt"

    def __post_init__(self) -> None:
        Decoder.__post_init__(self)
        if self.n_kv_heads != self.n_heads or self.n_heads * self.d_head != self.d_model:
            raise InvalidValue(
                f"n_kv_heads={self.n_kv_heads}, d_head={self.d_head}: a GPT has n_kv_heads = n_heads = "
                f"{self.n_heads} and n_heads x d_head = d_model = {self.d_model}; leave both out."
            )

    @property
    def longest_seq_len(self) -> int:
        return self.max_seq_len
