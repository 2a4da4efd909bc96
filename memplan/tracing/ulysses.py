"""DeepSpeed's Ulysses around a module of transformers: ranks divide sequences, and in attention heads.

Each rank has a piece of each sequence. All-to-alls give it whole sequences of some of the heads, and its
piece of attention's output of all heads. Positions are gathered for each layer, and the loss is a mean over
the ranks, weighted by their tokens.

Source: `deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPAttentionHF` (0.19),
transformers.integrations.deepspeed (`deepspeed_sp_compute_loss`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any, final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memplan.errors import MissingRule
from memplan.tracing.cache import without_remarks
from memplan.tracing.divided import Parallelize, windows_of
from memplan.tracing.example import Example, checked_example


def divided_by_ulysses(module: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Example, Parallelize]:
    """The module called with the inputs that DeepSpeed's data loader hands on, and what divides it.

    Raises:
        MissingRule: the module is no causal language model.
    """
    if "shift_labels" not in inputs:
        raise MissingRule(
            f"cp: {type(module).__name__} is no causal language model, whose labels DeepSpeed's data loader "
            "shifts; use cp=1.",
            kind="DeepSpeed's Ulysses of a model that is no causal language model",
        )
    sequences = SequenceParallel()
    example = checked_example(
        module, {name: one for name, one in inputs.items() if name != "labels"}, sequences.loss
    )
    return example, sequences.parallelize


@final
class SequenceParallel:
    """A module of transformers over the sequence-parallel ranks that `parallelize` gets, and its loss."""

    def __init__(self) -> None:
        self._ranks: Any = None
        self._labels: Tensor | None = None

    def parallelize(self, module: nn.Module, ranks: Any) -> None:
        """Have the module called with the labels that DeepSpeed's data loader has shifted.

        Raises:
            MissingRule: its attention or its layers are refused, by DeepSpeed or by Accelerate.
        """
        self._ranks = ranks["cp"]
        _check_attention(module, self._ranks.size())
        forward: Any = module.forward

        def called(*, shift_labels: Tensor, **given: Any) -> Any:
            self._labels = shift_labels
            return forward(**given, labels=shift_labels, shift_labels=shift_labels)

        vars(module)["forward"] = called

    def loss(self, output: Any) -> Tensor:
        """The loss of the whole sequences, from what the module returns for this rank's pieces."""
        compute_loss = import_module("transformers.integrations.deepspeed").deepspeed_sp_compute_loss
        labels, self._labels = self._labels, None
        found: Tensor = compute_loss(
            SimpleNamespace(torch_device_mesh={"sp": self._ranks}),
            lambda **_: output,
            {"shift_labels": labels, "labels": labels},
            return_outputs=False,
            pc=SimpleNamespace(sp_backend="", sp_size=self._ranks.size()),
        )
        return found


def _check_attention(module: Any, n_ranks: int) -> None:
    """Raise for attention that DeepSpeed refuses, and for layers that Accelerate refuses.

    Source: accelerate.big_modeling (`_refuse_recurrent_layers_under_sequence_parallelism`).
    """
    config = module.config.get_text_config()
    if config._attn_implementation == "eager":
        raise MissingRule(
            f"cp={n_ranks}: {type(module).__name__} has eager attention, which DeepSpeed's Ulysses refuses "
            "('it requires a 4D attention_mask'); use cp=1, or a model of fused attention.",
            kind="DeepSpeed's Ulysses beside eager attention",
        )
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", 0)
    if heads % n_ranks or not kv_heads or (kv_heads % n_ranks and n_ranks % kv_heads):
        raise MissingRule(
            f"cp={n_ranks}: DeepSpeed's Ulysses does not divide the {heads} heads of queries and "
            f"{kv_heads or 'no stated number'} of keys of {type(module).__name__} ('is not divisible by SP "
            "size'); use a cp that divides both.",
            kind="heads that do not divide over the ranks of Ulysses",
        )
    if windows := windows_of(config):
        raise MissingRule(
            f"cp={n_ranks}: {type(module).__name__} has attention with a {' and a '.join(windows)}, whose "
            "masks DeepSpeed's Ulysses drops; use cp=1, or a model of full attention.",
            kind="DeepSpeed's Ulysses beside attention within windows",
        )
    kinds = getattr(config, "layer_types", None) or ()
    if others := sorted({one for one in kinds if "linear" in one or "attention" not in one}):
        raise MissingRule(
            f"cp={n_ranks}: {type(module).__name__} has layers of type {', '.join(others)}, which Ulysses "
            "does not divide ('Sequence parallelism does not support' them); use cp=1, or another model.",
            kind="DeepSpeed's Ulysses beside layers with a recurrent state",
        )


@contextmanager
def exchanging_heads(module: Any, ranks: Any) -> Iterator[None]:
    """A block in which attention runs over whole sequences of this rank's heads, as NCCL exchanges them."""
    functions = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    name = module.config.get_text_config()._attn_implementation
    core = functions[name]
    with ExitStack() as stack:
        stack.callback(functions.__setitem__, name, core)
        functions[name] = _Attention(core=core, group=ranks.get_group())
        stack.enter_context(without_remarks())
        stack.enter_context(patch.object(dist, "get_backend", lambda group=None: dist.Backend.NCCL))
        stack.enter_context(patch.object(dist, "all_gather", _all_gather))
        stack.enter_context(patch.object(dist, "reduce_scatter", _reduce_scatter))
        yield


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """Attention by `core` of whole sequences, between all-to-alls over the ranks of a group."""

    core: Any
    group: Any

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **given: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Output and weights of this rank's pieces; queries, keys, values are (batch, heads, seq, d)."""
        positions = [torch.empty_like(given["position_ids"]) for _ in range(self.group.size())]
        dist.all_gather(positions, given["position_ids"], group=self.group)
        given["position_ids"] = torch.cat(positions, dim=1)
        query, key, value = [x.permute(2, 0, 1, 3) for x in (query, key, value)]
        wide = [self._of_own_heads(x) for x in (query, key, value)]
        wide[0] = wide[0].permute(1, 2, 0, 3).contiguous()
        wide[1] = wide[1].permute(1, 2, 0, 3).contiguous()
        wide[2] = wide[2].permute(1, 2, 0, 3).contiguous()
        if self.group.size() > key.shape[2]:
            module.num_key_value_groups = wide[0].shape[1] // wide[1].shape[1]
        found, weights = self.core(module, *wide, None, *args, **given)
        found = found.transpose(0, 1).flatten(2)
        output = self._of_own_piece(found).transpose(0, 1)
        return output, weights

    def _of_own_heads(self, x: Tensor) -> Tensor:
        """(own seq, batch, heads, d) as (seq, batch, own heads, d); too few heads are repeated first."""
        n = self.group.size()
        if n > x.shape[2]:
            x = x.repeat_interleave(n // x.shape[2], dim=2)
        seq, batch, heads, d = x.shape
        sent = x.reshape(seq, batch, n, heads // n, d).permute(2, 0, 1, 3, 4).contiguous()
        found: Tensor = _AllToAll.apply(sent, self.group)  # type: ignore[no-untyped-call]
        return found.reshape(n * seq, batch, heads // n, d)

    def _of_own_piece(self, x: Tensor) -> Tensor:
        """(seq, batch, own width) as (own seq, batch, width)."""
        _, batch, width = x.shape
        sent = x.reshape(self.group.size(), -1, batch, width).contiguous()
        found: Tensor = _AllToAll.apply(sent, self.group)  # type: ignore[no-untyped-call]
        return found.permute(1, 2, 0, 3).flatten(2).contiguous()


class _AllToAll(torch.autograd.Function):
    """The exchange of the first dim between all ranks; so is its gradient's.

    Source: `deepspeed.sequence.layer:_dim_zero_all_to_all`.
    """

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchanged(sent, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grads[0].contiguous(), ctx.group), None


def _exchanged(sent: Tensor, group: Any) -> Tensor:
    found = torch.empty_like(sent)
    dist.all_to_all_single(found, sent, group=group)
    return found


def _all_gather(outputs: Sequence[Tensor], own: Tensor, group: Any = None, async_op: bool = False) -> None:
    """An all-gather into tensors of a list, which NCCL's are copied out of one.

    Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (`ProcessGroupNCCL::allgather`).
    """
    flat = own.new_empty((len(outputs), *own.shape))
    dist.all_gather_into_tensor(flat, own, group=group)
    for output, one in zip(outputs, flat, strict=True):
        output.copy_(one)


def _reduce_scatter(output: Tensor, own: Sequence[Tensor], op: Any = None, group: Any = None) -> None:
    """A reduce-scatter of the tensors of a list, which are copied into one for NCCL.

    Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (`ProcessGroupNCCL::reduce_scatter`).
    """
    flat = own[0].new_empty((len(own), *own[0].shape))
    for one, place in zip(own, flat, strict=True):
        place.copy_(one)
    dist.reduce_scatter_tensor(output, flat, group=group)
