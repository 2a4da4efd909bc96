"""The peaks of allocated and reserved bytes of one rank's first steps in PyTorch's caching allocator."""
