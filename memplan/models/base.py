"""The interface of a model to engines, and the decoder-only transformer that most families are."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from typing import Any, ClassVar, Final, Literal, NamedTuple

from memplan.checks import checked_count, checked_flag, checked_fraction
from memplan.device import Device
from memplan.errors import InvalidValue, MissingRule, divisors_text, shown_value
from memplan.mesh import Group, degrees_text
from memplan.ops import chunked_linear_cross_entropy, cross_entropy, linear
from memplan.shapes import INT64, Buffer, buffer_of
from memplan.tape import Tape, Tensor

MOST_LAYERS: Final = 10_000
"""More are taken for a mistake: the deepest trained model has 1,000 (Wang et al. 2022, arXiv:2203.00555)."""

BLOCKS: Final = "blocks"
"""The kind of a model's blocks if all are equal."""


Role = Literal["block", "module", "between", "idle"]
"""What a part of `Model.layers` is: a block; a module that is wrapped like one, but never recomputed; what
runs between two stacks of blocks, whose weights are the root's; blocks that are never called.
"""


class Layers(NamedTuple):
    """Consecutive blocks of one kind. The names of their tensors begin with the kind's."""

    kind: str
    n: int


USUAL_SEQ_LEN: Final = 8192
"""Tokens of a sequence where the model's context is longer and no length was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(ABC):
    """A language model as engines see it: an embedding, blocks of one or several kinds, a head.

    `d_model` is the width of the tensor between blocks, `max_seq_len` the trained context. Frozen: change a
    field with `dataclasses.replace`. A subclass adds sizes of its own and writes the forward pass: `embed`, a
    `block` of each kind, `head`. A tied head names the embedding's table as its weight.

    Raises:
        InvalidValue: a size that is no positive integer.
    """

    family: ClassVar[str] = "custom"
    """The family's name in the registry (`memplan.models.families`), if it has one."""
    implementation: ClassVar[str] = "reference"
    """The word for the code that the forward pass follows."""
    code: ClassVar[str] = "memplan's own modules (validate/systems/torch)"
    """The name of that code and its version, for people."""

    axes: ClassVar[tuple[str, ...]] = ("pp", "tp")
    """The mesh axes, beside the data axes, that the code can be divided over."""
    divides_itself: ClassVar[bool] = True
    """Whether its operations know how the tensor axis divides them; else it is traced (`lookup.divided`)."""
    chunks_loss: ClassVar[bool] = True
    """Whether the loss can be computed piece by piece (`loss_chunks`)."""
    computes_loss: ClassVar[bool] = False
    """Whether the module computes its loss in its own forward pass, and so under its autocast."""
    takes_padding_mask: ClassVar[bool] = False
    """Whether rules say what a mask of padding, as transformers' Trainer hands over, changes."""
    holds_embedding: ClassVar[bool] = False
    """Whether a variable of the forward pass refers to the first block's input until `Tape.let_go`."""
    blocks_return_views: ClassVar[bool] = False
    """Whether a block's output is a view, which PyTorch does not detach in place."""
    module_order: ClassVar[tuple[str, ...]] = ("",)
    """How names of a block's parameters begin, in the module's order where that is not the calls' order."""

    name: str
    d_model: int
    max_seq_len: int
    remarks: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Sentences on how the model was read, which the notes of an estimate repeat."""
    asked_dtype: str = field(default="", compare=False, repr=False)
    """The type that its config.json names for loaded weights, with the key, as "dtype=bfloat16"."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InvalidValue(f"name={shown_value(self.name)} is not allowed; use a text that is not empty.")
        for size in ("d_model", "max_seq_len"):
            object.__setattr__(self, size, checked_count(size, getattr(self, size)))

    @property
    def usual_seq_len(self) -> int:
        """Tokens of a sequence that nobody has given: the model's context, and at most `USUAL_SEQ_LEN`.

        Contexts of 128k tokens are reached by a last, short training; nearly all pretraining and
        fine-tuning has sequences of at most 8,192.
        """
        return min(self.max_seq_len, USUAL_SEQ_LEN)

    @property
    def usual_seq_len_said(self) -> tuple[str, ...]:
        """A sentence that `usual_seq_len` is not the model's context; none if it is."""
        usual, longest = self.usual_seq_len, self.max_seq_len
        if usual == longest:
            return ()
        left_out = f"The length was left out: sequences of {usual:,} tokens"
        return (f"{left_out}, of the {longest:,} of the model's context (seq_len, --seq-len).",)

    @property
    @abstractmethod
    def layers(self) -> tuple[Layers, ...]:
        """The blocks in order."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of blocks, each once."""
        return tuple(dict.fromkeys([kind for kind, _ in self.layers]))

    def place_in_module(self, parameter: str) -> int:
        """The place of a parameter in its block's module; parameters of one place are in order of use."""
        name = parameter.partition(".*.")[2]
        return next(i for i, begins in enumerate(self.module_order) if name.startswith(begins))

    def role(self, kind: str) -> Role:
        """What the parts of this kind are."""
        return "block"

    @property
    def n_experts(self) -> int:
        """How many experts a block has of which a router chooses some; 0: none, or it is not known."""
        return 0

    @property
    def n_blocks(self) -> int:
        """How many blocks there are."""
        return sum([n for _, n in self.layers])

    def layers_in(self, blocks: range) -> tuple[Layers, ...]:
        """The kinds of some of the blocks, in order."""
        kinds = [kind for kind, n in self.layers for _ in range(n)]
        return tuple(
            Layers(kind, len(list(same))) for kind, same in groupby(kinds[blocks.start : blocks.stop])
        )

    @property
    def longest_seq_len(self) -> int | None:
        """The longest sequence that the model takes: its table of learned positions; None: any."""
        return None

    @property
    def sizes_over_tp(self) -> Mapping[str, int]:
        """Sizes that the tensor axis must divide, by name, for the text of a refusal.

        Other sizes are refused by the operations, in their words.
        """
        return {}

    @property
    def mesh(self) -> Mapping[Group, int]:
        """The ranks along each axis over which it is divided already."""
        return {}

    def config_values(self) -> dict[str, Any] | None:
        """The config.json of its module, from which it is traced divided; None if nothing says it."""
        return None

    def buffers(self, seq_len: int) -> tuple[Buffer, ...]:
        """The module's buffers, such as rotary angles: each pipeline stage has its own."""
        return ()

    def blocks_called_with(self, seq_len: int) -> tuple[Buffer, ...]:
        """The module's buffers that it calls its blocks with."""
        return ()

    @property
    def made_after_buffers(self) -> str:
        """The name of the module that comes after the one with the buffers; empty: they are made last."""
        return ""

    def embedding_buffers(self) -> tuple[Buffer, ...]:
        """The embedding's buffers, which only the first pipeline stage has."""
        return ()

    def notes(self, device: Device, micro_batch: int) -> Iterator[str]:
        """Sentences about the model, trained on such a device, that no figure says."""
        yield from ()

    def inputs(self, samples: int, seq_len: int) -> tuple[Buffer, ...]:
        """The input tensors for `samples` sequences; only the first pipeline stage gets the first of them."""
        return tuple([buffer_of(name, (samples, seq_len), INT64) for name in ("tokens", "targets")])

    def sizes(self) -> dict[str, Any]:
        """Its fields as plain values, without those that say how it was read."""
        own = {each.name for each in fields(self) if each.compare}
        return {name: value for name, value in asdict(self).items() if name in own}

    def loss(self, logits: Tensor) -> Tensor:
        """The loss of a micro-batch, a scalar."""
        return cross_entropy(logits)

    def after_backward(self, tape: Tape) -> None:
        """What the training loop computes after a backward pass, of tensors that the model has held."""
        return

    def receive(self, tokens: Tensor) -> None:
        """Make the arguments of all blocks in a pipeline stage that is not the first, as `embed` makes them.

        Of the tokens (batch, seq) it knows the shape only.
        """
        return

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids (batch, seq) to the first block's input (batch, seq, d_model)."""

    @abstractmethod
    def block(self, x: Tensor, kind: str) -> Tensor:
        """One block of a kind: (batch, seq, d_model) to (batch, seq, d_model)."""

    @abstractmethod
    def head(self, x: Tensor) -> Tensor:
        """The last block's output to logits (batch, seq, vocabulary)."""


def not_divided_so(model: Model, mesh: Mapping[Group, int]) -> MissingRule:
    """The error for degrees that a module was not traced with."""
    return MissingRule(
        f"{degrees_text(mesh)}: {model.name} was traced with {degrees_text(model.mesh)}, and no rule says "
        "what other degrees change; trace it with memplan.trace(..., mesh={...}), or use the traced ones.",
        kind="a traced model over degrees that it was not traced with",
    )


def not_adapted(model: Model) -> MissingRule:
    """The error for a model beside whose weights PEFT trains no adapters."""
    way_out = "use implementation='huggingface', or a config.json"
    if model.implementation == "traced":
        way_out = "trace the module with its adapters in place (peft.get_peft_model, then memplan.trace)"
    return MissingRule(
        f"lora_rank is of PEFT, which trains adapters in modules of transformers; {model.name} is "
        f"{model.code}; {way_out}.",
        kind="LoRA of a model that is none of transformers",
    )


def model_dict(model: Model) -> dict[str, Any]:
    """A model as plain values."""
    return {"family": model.family, "implementation": model.implementation, **model.sizes()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder(Model):
    """A decoder-only transformer of `n_layers` equal blocks.

    Sizes are counts: `d_ff` is the width of the feed-forward layer, `d_head` of one attention head (0:
    d_model / n_heads), `n_kv_heads` the key and value heads (0: n_heads).

    Raises:
        InvalidValue: a size that is no positive integer, or sizes that contradict each other; a flag that is
            neither True nor False.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int = 0
    d_head: int = 0
    d_ff: int
    vocab_size: int
    tied_head: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        Model.__post_init__(self)
        object.__setattr__(self, "n_layers", checked_count("n_layers", self.n_layers, most=MOST_LAYERS))
        for size in ("n_heads", "d_ff", "vocab_size"):
            object.__setattr__(self, size, checked_count(size, getattr(self, size)))
        for size in ("n_kv_heads", "d_head"):
            object.__setattr__(self, size, checked_count(size, getattr(self, size), least=0))
        if self.d_head == 0:
            _check_divides("n_heads", self.n_heads, "d_model", self.d_model)
            object.__setattr__(self, "d_head", self.d_model // self.n_heads)
        if self.n_kv_heads == 0:
            object.__setattr__(self, "n_kv_heads", self.n_heads)
        _check_divides("n_kv_heads", self.n_kv_heads, "n_heads", self.n_heads)
        for own in fields(self):
            if own.type is bool:
                checked_flag(own.name, getattr(self, own.name))
        checked_fraction("dropout", self.dropout)

    @property
    def layers(self) -> tuple[Layers, ...]:
        return (Layers(BLOCKS, self.n_layers),)

    def layers_in(self, blocks: range) -> tuple[Layers, ...]:
        return (Layers(BLOCKS, len(blocks)),) if blocks else ()

    @property
    def sizes_over_tp(self) -> Mapping[str, int]:
        return {name: getattr(self, name) for name in ("n_heads", "n_kv_heads", "d_ff", "vocab_size")}

    @property
    def output_name(self) -> str:
        """The projection to the vocabulary: the token table itself if the head is tied."""
        return "embedding.tokens" if self.tied_head else "head.output"

    def logits(self, x: Tensor) -> Tensor:
        """The logits from the last norm's output; where torchtitan's loss makes them, that output."""
        if not x.tape.context.chunks_head:
            return linear(x, self.output_name, self.vocab_size, bias=False, split="columns")
        x.tape.parameter(f"{self.output_name}.weight", (self.vocab_size, self.d_model))
        return x

    def loss(self, logits: Tensor) -> Tensor:
        if not logits.tape.context.chunks_head:
            return cross_entropy(logits)
        return chunked_linear_cross_entropy(logits, self.output_name, self.vocab_size)


def _check_divides(name: str, value: int, of: str, total: int) -> None:
    if total % value:
        raise InvalidValue(f"{name}={value} does not divide {of}={total}; use one of {divisors_text(total)}.")
