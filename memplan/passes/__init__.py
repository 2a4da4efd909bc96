"""One micro-batch through a pipeline stage, forward and backward: of a family, or of a traced module."""
