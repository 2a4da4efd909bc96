"""The encoder and decoder of Lightning's demo, with the sizes of its page on FSDP: 1B parameters."""

import math
from collections.abc import Mapping
from typing import Final, cast

import torch
from torch import Tensor, nn

VOCABULARY: Final = 33_278
"""Words of WikiText-2."""

WIDTH: Final = 1024
MOST_POSITIONS: Final = 5000


class LightningDemo(nn.Module):
    """`lightning.pytorch.demos.Transformer` with 32 layers a stack, whose caches are there from the start.

    Its loss is of log-probabilities, as cross-entropy is, which takes the logits here.

    Source: Lightning-AI/pytorch-lightning, src/lightning/pytorch/demos/transformer.py;
    docs/source-pytorch/advanced/model_parallel/fsdp.rst.
    """

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("positions", torch.zeros(1, MOST_POSITIONS, WIDTH), persistent=False)
        self.transformer = nn.Transformer(
            d_model=WIDTH,
            nhead=64,
            num_encoder_layers=32,
            num_decoder_layers=32,
            dim_feedforward=4096,
            dropout=0.2,
            batch_first=True,
        )
        self.decoder = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        n = x.shape[1]
        allowed = torch.tril(torch.ones(n, n, device=x.device)) == 1
        mask = allowed.float().masked_fill(allowed == 0, float("-inf")).masked_fill(allowed == 1, 0.0)
        source, target = self._embedded(x), self._embedded(y)
        return cast(Tensor, self.decoder(self.transformer(source, target, tgt_mask=mask)))

    def _embedded(self, x: Tensor) -> Tensor:
        embedded = self.embedding(x) * math.sqrt(WIDTH)
        return cast(Tensor, self.dropout(embedded + self.positions[:, : x.shape[1]]))


def texts(samples: int, seq_len: int, generator: torch.Generator) -> Mapping[str, Tensor]:
    """Texts, and the next words, which are inputs and targets."""
    text = torch.randint(VOCABULARY, (samples, seq_len + 1), generator=generator)
    return {"x": text[:, :-1].clone(), "y": text[:, 1:].clone(), "targets": text[:, 1:].clone()}
