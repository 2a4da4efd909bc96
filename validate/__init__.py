"""Really run the plans that memplan predicts, with PyTorch's own tools, and compare."""
