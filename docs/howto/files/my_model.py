"""A module of one's own: a small encoder, and the inputs of one step."""

import torch
from torch import nn


def factory() -> dict[str, object]:
    """What `memplan.trace` takes; on the meta device nothing of the module's size is allocated."""
    with torch.device("meta"):
        block = nn.TransformerEncoderLayer(1024, nhead=16, batch_first=True)
        module = nn.Sequential(
            nn.Embedding(32_000, 1024), nn.TransformerEncoder(block, num_layers=24), nn.Linear(1024, 32_000)
        )
    tokens = torch.zeros(1, 1024, dtype=torch.long)
    return {"module": module, "example_inputs": tokens, "targets": tokens}
