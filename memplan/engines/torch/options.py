"""The torch engine's own options: what stock PyTorch's classes know and other frameworks need not."""

from dataclasses import dataclass
from typing import Final, final

from memplan.fields import Choice, Count, Flag, described
from memplan.plan import Plan

DDP_COMM_HOOKS: Final = ("none", "fp16", "bf16", "powersgd")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptions:
    """The torch engine's own options, by the names that PyTorch has for them."""

    gradient_as_bucket_view: bool = described(
        False, Flag(text="DDP's gradients are views of its buckets", word="bucket-view")
    )
    static_graph: bool = described(
        False, Flag(text="DDP may rely on the same graph in each step", word="static-graph")
    )
    bucket_cap_bytes: int | None = described(
        None,
        Count(
            text="Bytes of DDP's buckets",
            left_out="25 MiB, the first one 1 MiB",
            optional=True,
            word="bucket",
        ),
    )
    ddp_comm_hook: str = described(
        "none", Choice(text="DDP's compression of gradients", choices=DDP_COMM_HOOKS, word="hook")
    )


def torch_options(plan: Plan) -> TorchOptions:
    """The options of a plan of the torch engine."""
    return plan.options or TorchOptions()
