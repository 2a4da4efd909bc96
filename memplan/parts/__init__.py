"""Parts of which engines are built: a stage, its module, DDP's buckets, flat groups, updates of weights."""
