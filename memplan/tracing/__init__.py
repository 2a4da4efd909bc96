"""Traces someone's `torch.nn.Module`: the one part of memplan that imports torch, when a module is traced.

The module runs forward and backward on tensors without data, so that a model of any size is traced on any
machine (`recorder`); what it did becomes a `memplan.models.TracedModel` (`units`), which needs no torch.
"""
