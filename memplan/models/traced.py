"""A model traced from someone's `torch.nn.Module`: the events of its passes, for any batch and length.

`memplan.trace` makes one. It is written as JSON and read back without torch.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, ClassVar, cast, final

from memplan.device import Device, DeviceType
from memplan.errors import MissingRule
from memplan.mesh import Group
from memplan.models.base import Layers, Model, Role
from memplan.models.recording import (
    AUTOTP,
    CONVOLUTIONS,
    EXPERTS,
    MIXTURE,
    MODULE,
    ULYSSES,
    UNITS,
    Recording,
    TracedKind,
    TracedTensor,
    Variant,
    shape_at,
)
from memplan.models.trace_to_json import plain
from memplan.models.workspaces import Asked
from memplan.shapes import Buffer, n_elements
from memplan.tape import Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TracedModel(Model):
    """A model traced from a `torch.nn.Module`; two are equal if their traces have the same content.

    Attributes whose meaning their name does not tell:
        d_model: nothing; what is handed from block to block is recorded.
        layers: its blocks by kind, in the order in which they are called, over all stacks.
        of_kind: each kind's role and parameters.
        tied: whether one parameter has several names.
        blocks: the path of each stack of blocks in the module, with a * for the blocks' number.
        embed_parameters, head_parameters: those before the first block, and all other ones that are no
            block's, in the module's order.
        module_buffers: what the module holds beside its parameters; DDP sends it to all ranks.
        device: whose kernels the trace is of.
        made_with: the releases it was traced with.
        has_sequence: whether sizes follow `seq_len`; if not, it is 1.
        limits: the batch and length (0: any) that were traced, where nothing is known of others.
        lengths: the least and the most tokens (0: any) of the sequences that it is of, where a window of
            attention has masks for longer ones.
        image_tokens: the tokens that each sequence begins with, and that stand for an image.
        neglects: the operations whose workspaces are not in the trace, but for what is `asked`.
        asked: the workspaces of convolutions as cuDNN was asked, for some GPUs and micro-batches.
        lacks: packages that were not installed, in whose place transformers' own code was traced.
        attention: "eager" if transformers' eager attention was traced; else "".
        unused: the parameters that require a gradient and get none; they take what frozen ones take.
        mesh: the ranks along each axis over which the module was divided; recordings are the first rank's.
        config: the config.json that its module was made of, from which it is traced for other degrees.
    """

    divides_itself: ClassVar[bool] = False
    family: ClassVar[str] = "traced"
    implementation: ClassVar[str] = "traced"
    code: ClassVar[str] = "the module's own"

    d_model: int = 0
    layers: tuple[Layers, ...] = field()
    of_kind: Mapping[str, TracedKind] = field(repr=False)
    blocks: tuple[str, ...]
    tied: bool
    embed_parameters: tuple[TracedTensor, ...] = field(repr=False)
    head_parameters: tuple[TracedTensor, ...] = field(repr=False)
    module_buffers: tuple[TracedTensor, ...] = field(repr=False)
    inputs_of_step: tuple[TracedTensor, ...] = field(repr=False)
    recordings: Mapping[Variant, Recording] = field(repr=False)
    device: DeviceType
    made_with: str
    has_sequence: bool
    limits: tuple[int, int] | None = None
    lengths: tuple[int, int] = (0, 0)
    image_tokens: int = 0
    neglects: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    attention: str = ""
    mesh: Mapping[Group, int] = field(default_factory=dict)
    asked: Asked = field(default=Asked(), repr=False)
    config: str = field(default="", compare=False, repr=False)
    _digest: list[str] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        """Nothing is checked: what is read from a file was checked there."""

    @property
    def digest(self) -> str:
        """A checksum of the trace's content, computed when it is first asked for."""
        import hashlib  # slow to import, and rarely needed

        if not self._digest:
            text = json.dumps(plain(self), separators=(",", ":"))
            self._digest.append(hashlib.sha256(text.encode()).hexdigest())
        return self._digest[0]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, TracedModel) and other.digest == self.digest)

    def __hash__(self) -> int:
        return hash((self.name, self.device, self.made_with))

    def buffers(self, seq_len: int) -> tuple[Buffer, ...]:
        return tuple([one.buffer(1, seq_len) for one in self.module_buffers])

    def buffers_beside(self, layers: Iterable[Layers], seq_len: int) -> Iterator[Buffer]:
        """The module's buffers where it has these of its blocks only, as a pipeline's stage has."""
        before = self.blocks[0].partition("*")[0] if self.blocks else "."
        kinds = [kind for kind, n in self.layers for _ in range(n)]
        of_kind: dict[str, dict[str, list[Buffer]]] = {}
        for one in self.module_buffers:
            number, _, _ = one.name.removeprefix(before).partition(".")
            buffer = one.buffer(1, seq_len)
            if one.name.startswith(before) and number.isdecimal():
                of_kind.setdefault(kinds[int(number)], {}).setdefault(number, []).append(buffer)
            else:
                yield buffer
        for kind, n in layers:
            yield from next(iter(of_kind.get(kind, {}).values()), []) * n

    def notes(self, device: Device, micro_batch: int) -> Iterator[str]:
        idle = sum([n for kind, n in self.layers if self.role(kind) == "idle"])
        if idle:
            yield (
                f"{idle} blocks of {self.name} are never called by the inputs it was traced with: their "
                "weights are held, and nothing else of them is counted."
            )
        if is_of_torchtitan(self):
            yield (
                f"{self.name} is planned as torchtitan ({self.made_with}) runs it, with its "
                "ScaledDotProductAttention for FlexAttention, and the loss of all tokens at once. Tokens are "
                "taken to choose all experts equally often: a rank whose experts are chosen more holds more "
                "activations, in proportion."
            )
        if self.image_tokens:
            yield (
                f"Each sequence of {self.name} begins with an image, which takes {self.image_tokens} of its "
                f"tokens ({', '.join(self._inputs_beside_tokens)}).{self._other_sizes}"
            )
        if self.attention == "eager":
            yield (
                f"{self.name} was traced with eager attention, which keeps the scores of all pairs of tokens "
                "for the backward pass; a fused kernel (flash attention with sinks, say) would not."
            )
        if self.lacks:
            packages = " and ".join(self.lacks)
            yield (
                f"{self.name} was traced without {packages}: what transformers computes in PyTorch instead "
                "is counted, and their kernels may allocate otherwise."
            )
        known = self.asked.knows(device.name, micro_batch)
        if known:
            yield (
                f"the workspaces of {self.name}'s convolutions are those that {self.asked.library} states "
                f"for {device.name}, asked without a GPU."
            )
        neglected = [one for one in self.neglects if not (known and one == CONVOLUTIONS)]
        if neglected:
            yield (
                f"the workspaces of {self.name}'s {' and '.join(neglected)} are not counted: cuDNN "
                "chooses its engines by GPU and release, and what they need is often as large as the layer's "
                "input and output. They matter to the peak where such a layer runs at it, and to what is "
                "reserved."
            )
        if CONVOLUTIONS in neglected and self.asked.runs:
            where = self.asked.nearest_text(device.name, micro_batch)
            yield f"the workspaces of {self.name}'s convolutions are known {where}."

    def inputs(self, samples: int, seq_len: int) -> tuple[Buffer, ...]:
        return tuple([one.buffer(samples, seq_len) for one in self.inputs_of_step])

    @property
    def parameters(self) -> Iterable[tuple[TracedTensor, int]]:
        """Every parameter, and the number of its equals (one per block)."""
        found = [(one, 1) for one in (*self.embed_parameters, *self.head_parameters)]
        counts: Counter[TracedTensor] = Counter()
        for kind, n in self.layers:
            counts.update(dict.fromkeys(self.of_kind[kind].parameters, n))
        return [*found, *counts.items()]

    @property
    def frozen(self) -> tuple[str, ...]:
        """The names of the parameters that are not trained: frozen, or unused."""
        return tuple([one.name for one, _ in self.parameters if not one.requires_grad])

    @property
    def is_zero3(self) -> bool:
        """Whether it was traced for DeepSpeed's ZeRO-3."""
        return any(variant.units == MODULE for variant in self.recordings)

    @property
    def is_ulysses(self) -> bool:
        """Whether it was traced over the sequence-parallel ranks of DeepSpeed's Ulysses."""
        return any(variant.rotate == ULYSSES for variant in self.recordings)

    @property
    def is_autotp(self) -> bool:
        """Whether it was traced over the tensor-parallel ranks of DeepSpeed's AutoTP."""
        return AUTOTP in (self.config_values() or {})

    @property
    def integer_dtypes(self) -> tuple[str, ...]:
        """The types of parameters that are not of floats."""
        return tuple(sorted({one.dtype for one, _ in self.parameters if not one.is_floating_point}))

    @property
    def narrow_dtypes(self) -> tuple[str, ...]:
        """The types of floats that frozen parameters keep beside others in float32."""
        kept = [one for one, _ in self.parameters if one.keeps_dtype and one.is_floating_point]
        return tuple(sorted({one.dtype for one in kept}))

    @property
    def trained_dtypes(self) -> tuple[str, ...]:
        """The types in which the module holds the parameters that it trains."""
        return tuple(sorted({one.dtype for one, _ in self.parameters if one.requires_grad}))

    @property
    def n_parameters(self) -> int:
        """Elements of all weights."""
        return sum([n * n_elements(shape_at(one.shape, 1, 1)) for one, n in self.parameters])

    @property
    def _inputs_beside_tokens(self) -> Iterator[str]:
        """The inputs of floats of one sequence, as "pixel_values of 3 x 336 x 336", in words."""
        for one in self.inputs_of_step:
            if one.is_floating_point:
                rows, *dims = shape_at(one.shape, 1, 1)
                dims = [rows, *dims] if rows > 1 else dims
                yield f"{one.name} of {' x '.join(map(str, dims))}"

    @property
    def _other_sizes(self) -> str:
        """How to plan for images of another size, where a model takes any."""
        if not (self.of_batch and self.config):
            return ""
        values = self.config_values() or {}
        size = values.get("vision_config", {}).get("image_size", "448, the default")
        return (
            f" It has {size} rows and columns of pixels; for another size write image_size into the "
            "vision_config of its config.json."
        )

    @property
    def of_batch(self) -> int:
        """The micro-batch that a trace for any length is of, where samples are gone through; 0: any."""
        batch, length = self.limits or (0, 0)
        return 0 if length else batch

    def is_of(self, seq_len: int) -> bool:
        """Whether the trace covers sequences of `seq_len` tokens."""
        least, most = self.lengths
        return least <= seq_len and (not most or seq_len <= most)

    def recording(
        self,
        *,
        weights: str,
        autocast: str,
        recompute: str,
        batch: int,
        seq_len: int,
        units: str = "",
        cp_rank: int = 0,
        rotate: str = "",
    ) -> Recording:
        """The recording of a micro-batch under these units of FSDP2, `seq_len` tokens on a rank.

        Of context-parallel ranks the one at this place, or the first if that was not recorded.

        Raises:
            MissingRule: it was not recorded so, or not for these sizes.
        """
        whole = seq_len * self.mesh.get("cp", 1)
        limits = self.limits or (0, 0)
        if any(limit not in (0, size) for limit, size in zip(limits, (batch, whole), strict=True)):
            samples, length = limits
            sizes = [f"a micro-batch of {samples}"] if samples else []
            sizes += [f"seq_len={length}"] if length else []
            raise MissingRule(
                f"{self.name} was traced with {' and '.join(sizes)}, and what it does at other sizes "
                "follows from no rule; use these, or trace it again.",
                kind="a traced model at a size that was not traced",
            )
        if whole <= self.image_tokens:
            raise MissingRule(
                f"seq_len={whole}: each sequence of {self.name} begins with an image of {self.image_tokens} "
                f"tokens; use {self.image_tokens + 1} tokens or more.",
                kind="sequences without room for the image that a traced model is given",
            )
        if not self.is_of(whole):
            least, most = self.lengths
            known = f"at most {most}" if most else f"{least} or more"
            raise MissingRule(
                f"seq_len={whole}: {self.name} was traced for sequences of {known} tokens, as its attention "
                "makes masks for those that reach its window; use such a length, or trace it with inputs of "
                "yours: memplan.trace(module, inputs).",
                kind="a traced model on the other side of its attention's window",
            )
        if not self.has_sequence and seq_len != 1:
            raise MissingRule(
                f"seq_len={seq_len}: the inputs of {self.name} have no sequence; use seq_len=1.",
                kind="a traced model that has no sequence",
            )
        asked = Variant(weights, autocast, recompute, batch == 1, rotate=rotate if "cp" in self.mesh else "")
        fewer = (MODULE,) if units == MODULE else UNITS[UNITS.index(units) :: -1]
        for place, known in product((cp_rank, 0), fewer):
            if (variant := asked._replace(units=known, cp_rank=place)) in self.recordings:
                return self.recordings[variant]
        others = sorted({_variant_text(variant) for variant in self.recordings})
        said = _variant_text(asked._replace(units=units))
        raise MissingRule(
            f"{self.name} was not traced with {said}, but with: {'; '.join(others)}; use "
            "these, or trace it again so, if PyTorch runs it so (on CUDA no batch norm with weights in "
            "bfloat16).",
            kind="a traced model in a way in which it was not traced",
        )

    def config_values(self) -> dict[str, Any] | None:
        return cast(dict[str, Any], json.loads(self.config)) if self.config else None

    @property
    def n_experts(self) -> int:
        values = self.config_values() or {}
        found = [values[key] for key in EXPERTS if isinstance(values.get(key), int)]
        return found[0] if found else 0

    def role(self, kind: str) -> Role:
        return self.of_kind[kind].role

    @property
    def n_blocks(self) -> int:
        return self.n_layers

    @property
    def n_layers(self) -> int:
        """How many blocks its stacks have."""
        return sum([n for kind, n in self.layers if self.role(kind) == "block"])

    @property
    def n_stacks(self) -> int:
        """How many parts its blocks are in that other operations separate."""
        return sum([self.role(kind) == "between" for kind, _ in self.layers]) + 1

    def layers_in(self, blocks: range) -> tuple[Layers, ...]:
        return self.layers if len(blocks) == self.n_layers else Model.layers_in(self, blocks)

    def sizes(self) -> dict[str, Any]:
        names = ("name", "n_layers", "max_seq_len", "device", "made_with", "digest")
        return {**{name: getattr(self, name) for name in names}, "blocks": ", ".join(self.blocks)}

    def embed(self, tokens: Tensor) -> Tensor:
        raise self._no_rules()

    def block(self, x: Tensor, kind: str) -> Tensor:
        raise self._no_rules()

    def head(self, x: Tensor) -> Tensor:
        raise self._no_rules()

    def _no_rules(self) -> MissingRule:
        return MissingRule(
            f"{self.name} was traced: its operations are known as they ran, and have no rules; use "
            "engine='torch' with tp=1."
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        with open(path, "w", encoding="utf-8") as file:
            made_of = {"config": json.loads(self.config)} if self.config else {}
            file.write(json.dumps(plain(self) | made_of, separators=(",", ":")) + "\n")


def is_of_torchtitan(model: Model) -> bool:
    """Whether a model is torchtitan's own module of a mixture of experts."""
    return isinstance(model, TracedModel) and MIXTURE in (model.config_values() or {})


def modules_with(parameters: Iterable[str]) -> tuple[str, ...]:
    """Paths of the modules that hold these parameters, in order; without those inside another one of them.

    >>> modules_with(["wte.weight", "encoder.bias", "encoder.norm.weight", "encoder.norm.bias"])
    ('wte', 'encoder')
    """
    paths = dict.fromkeys(name.rpartition(".")[0] for name in parameters)
    return tuple([path for path in paths if not any(_is_within(path, other) for other in paths)])


def _is_within(path: str, other: str) -> bool:
    return path != other and (not other or path.startswith(f"{other}."))


def _variant_text(variant: Variant) -> str:
    autocast = f", autocast to {variant.autocast}" if variant.autocast else ""
    samples = "one sample" if variant.alone else "several samples"
    rotate = f", {variant.rotate}" if variant.rotate else ""
    rotate += ", by ZeRO-3's modules" if variant.units == MODULE else ""
    return f"{samples}, weights in {variant.weights}{autocast}, recompute={variant.recompute!r}{rotate}"
