"""The abstract tensor (being written)."""


class Tensor:
    """placeholder"""
