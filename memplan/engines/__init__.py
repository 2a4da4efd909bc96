"""Engines: which states and buffers a training framework keeps, and when."""
