"""What the kernels of a step run on, as far as what they allocate depends on it."""

from typing import Final, Literal, NamedTuple

DeviceType = Literal["cpu", "cuda"]


class Device(NamedTuple):
    """A kind of device.

    `type` is torch's ("cuda" for AMD's GPUs too), `capability` CUDA's compute capability, `multiprocessors`
    how many it has. Of CPUs and AMD's GPUs neither is known. Unless it `runs_kernels`, as where tensors have
    shapes and no data, nothing is that a kernel allocates for itself while it runs.
    """

    type: DeviceType
    capability: tuple[int, int] | None = None
    multiprocessors: int = 0
    runs_kernels: bool = True

    @property
    def on_cpu(self) -> bool:
        """Whether it is no GPU."""
        return self.type == "cpu"

    @property
    def casts_in_copies(self) -> bool:
        """Whether a kernel first copies operands into the type that it computes in, as CPU's do.

        Source: aten/src/ATen/TensorIterator.cpp (`compute_types`).
        """
        return self.on_cpu and self.runs_kernels

    @property
    def threads_per_multiprocessor(self) -> int:
        """Most threads that one multiprocessor holds.

        Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
        """
        return {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536}.get(self.capability or (0, 0), 2048)

    def at_least(self, major: int, minor: int = 0) -> bool:
        """Whether it is a GPU of this compute capability or a later one.

        >>> H100.at_least(9), H100.at_least(10), CPU.at_least(8)
        (True, False, False)
        """
        return self.capability is not None and self.capability >= (major, minor)


CPU: Final = Device("cpu")
CPU_OF_SHAPES: Final = Device("cpu", runs_kernels=False)
"""Where PyTorch's code for CPUs runs on tensors without data."""

A100: Final = Device("cuda", (8, 0), 108)
H100: Final = Device("cuda", (9, 0), 132)
"""What an estimate without a cluster is for."""
