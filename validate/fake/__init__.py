"""PyTorch's own code at true size on any machine: tensors have shapes, storages have sizes, nothing has data.

The dispatcher, autograd, DDP, FSDP2, tensor parallelism, pipelines and optimizers are the real ones; where a
kernel would run, PyTorch's own rule for its results' shapes does (`FakeTensorMode`). So bytes are measured,
and nothing else: no values, no times, nothing that a kernel allocates for itself while it runs.
"""

from validate.fake.lifetimes import Lifetimes
from validate.fake.tensors import without_data

__all__ = ["MEANING", "Lifetimes", "without_data"]

MEANING = (
    "PyTorch's real code over tensors without data: bytes are those of the storages it makes; "
    "no kernel runs, so there are no values and no times"
)
"""The kind of truth, as written in every record of such a run."""
