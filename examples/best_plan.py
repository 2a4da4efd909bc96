"""The best plan of a cluster, and a script of PyTorch's own calls that trains it."""

from memplan.search import searched

found = searched("llama-3-8b", cluster="16xa100", global_batch=256, seq_len=4096, offload=False)
print(found)

script = found.best.export("torchrun")
print(f"\nA script of {len(script.splitlines())} lines, which begins\n")
print("\n".join(script.splitlines()[:12]))
