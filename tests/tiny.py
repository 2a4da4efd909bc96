"""A model that trains in a moment, and the head of a suite's file that names it."""

from memplan import Llama

TINY = Llama(name="tiny", n_layers=2, d_model=32, n_heads=2, d_ff=64, vocab_size=128, max_seq_len=32)
DEFAULTS = """
[defaults]
seq_len = 16
precision = "fp32"

[defaults.model]
family = "llama"
n_layers = 2
d_model = 32
n_heads = 2
d_ff = 64
vocab_size = 128
max_seq_len = 32
"""
