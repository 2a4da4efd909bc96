"""A GPU that is not there: PyTorch's CUDA build over a played CUDA runtime, on any machine.

Kernels do nothing and device memory is address space without pages; everything above them is the real thing:
the dispatcher and its choice of kernels, autograd, optimizers, DDP, FSDP2, tensor parallelism, pipelines,
`ProcessGroupNCCL`, cuDNN's choice of engines and their workspaces, and the CUDA caching allocator with its
statistics and its out-of-memory errors. So bytes are measured, and nothing else: no values, no times, none of
what a GPU's driver and NCCL hold for themselves.

A tensor reads as zeros until something is copied to it, wherever it lies; so does what a kernel computes into
one. Copies of more than 1 MiB move nothing, and what a kernel changes in place reads as it did before.
A length that a kernel counts is zero: no element is nonzero, and a mask selects nothing, whatever was copied
to it.

The stand-in is a shared library (`played/`, C++), loaded before PyTorch into processes started for it alone
(`environment_for`), never into the user's own.
"""

from validate.nogpu.build import NoGpuUnavailable, can_be_built
from validate.nogpu.groups import parts_told
from validate.nogpu.processes import MEANING, RecordStream, environment_for

__all__ = ["MEANING", "NoGpuUnavailable", "RecordStream", "can_be_built", "environment_for", "parts_told"]
