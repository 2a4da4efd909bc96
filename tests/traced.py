"""The module of a model that memplan knows, traced as other people's are."""

from collections.abc import Sequence

import torch

import memplan
from memplan import TracedModel
from memplan.device import DeviceType
from memplan.models.base import Decoder
from validate.systems.torch.modules import Transformer, token_loss

PRECISIONS = ("fp32", "bf16", "bf16-mixed", "fp16-mixed")


def trace_of(
    model: Decoder, device: DeviceType, precisions: Sequence[str] = PRECISIONS, *, zero3: bool = False
) -> TracedModel:
    """The trace of the model's module in some precisions, called with tokens of its whole context."""
    module = Transformer(model, range(model.n_layers), seq_len=model.max_seq_len)
    tokens = torch.randint(model.vocab_size, (2, model.max_seq_len))
    return memplan.trace(
        module,
        tokens,
        targets=tokens.clone(),
        loss=token_loss,
        precisions=precisions,
        device=device,
        zero3=zero3,
    )
