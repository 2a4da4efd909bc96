"""Your own module, traced on tensors without data: it needs torch, not a GPU."""

import torch
from torch import nn

import memplan

with torch.device("meta"):  # nothing of the module's size is allocated
    block = nn.TransformerEncoderLayer(1024, nhead=16, batch_first=True)
    encoder = nn.TransformerEncoder(block, num_layers=8)
    module = nn.Sequential(nn.Embedding(32_000, 1024), encoder, nn.Linear(1024, 32_000))
tokens = torch.zeros(1, 512, dtype=torch.long)

model = memplan.trace(module, tokens, targets=tokens, device="cuda")
for zero in (0, 2, 3):
    e = memplan.estimate(model, cluster="8xa100", zero=zero, micro_batch=8)
    print(
        f"zero={zero}: {e.verdict}, {e.peak.total_bytes / 2**30:.2f} GiB of tensors, worst in {e.worst.when}"
    )
