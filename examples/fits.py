"""Does it fit, and what fills the GPU? The ten largest tensors at the worst instant."""

import memplan

e = memplan.estimate("llama-3-8b", cluster="8xh100-sxm", zero=3, seq_len=4096)
low, high = (value / 2**30 for value in e.device_bytes)
print(f"{e.verdict}: a GPU holds {low:.1f} to {high:.1f} GiB")
print(f"worst instant: {e.worst.when}")
print(e.ledger()[["name", "kind", "count", "total_bytes"]].head(10).to_string(index=False))
