"""Runs the plans that memplan predicts, with real PyTorch, and compares both."""
