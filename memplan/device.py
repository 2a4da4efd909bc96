"""The device that a step runs on, as far as allocations of kernels depend on it."""

from typing import Final, Literal, NamedTuple

DeviceType = Literal["cpu", "cuda"]


class Device(NamedTuple):
    """A kind of device.

    `type` is torch's ("cuda" for AMD's GPUs too), `capability` is CUDA's compute capability and
    `multiprocessors` their number; both are left out for CPUs and AMD's GPUs. `runs_kernels`: tensors have
    data, so that kernels run and allocate buffers of their own. `name`: the GPU's in memplan's table, by
    which a trace keeps what cuDNN was asked about it.
    """

    type: DeviceType
    capability: tuple[int, int] | None = None
    multiprocessors: int = 0
    runs_kernels: bool = True
    name: str = ""

    @property
    def on_cpu(self) -> bool:
        """Whether it is a CPU."""
        return self.type == "cpu"

    @property
    def has_rules(self) -> bool:
        """Whether rules of its kernels and its caching allocator are known: CPU's and CUDA's, not ROCm's."""
        return self.on_cpu or self.capability is not None

    @property
    def casts_in_copies(self) -> bool:
        """Whether kernels first copy their operands to the type that they compute in, as on CPU.

        Source: aten/src/ATen/TensorIterator.cpp (`compute_types`).
        """
        return self.on_cpu and self.runs_kernels

    @property
    def threads_per_multiprocessor(self) -> int:
        """The most threads that one multiprocessor holds at once.

        Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
        """
        return {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}.get(self.capability or (0, 0), 2048)

    def at_least(self, major: int, minor: int = 0) -> bool:
        """Whether it is a GPU with at least this compute capability.

        >>> H100.at_least(9), H100.at_least(10), CPU.at_least(8)
        (True, False, False)
        """
        return self.capability is not None and self.capability >= (major, minor)


CPU: Final = Device("cpu")
CPU_OF_SHAPES: Final = Device("cpu", runs_kernels=False)
"""PyTorch's code for CPUs, run on tensors without data."""

A100: Final = Device("cuda", (8, 0), 108, name="a100-80-sxm")
H100: Final = Device("cuda", (9, 0), 132, name="h100-sxm")
"""The device of an estimate without a cluster."""
