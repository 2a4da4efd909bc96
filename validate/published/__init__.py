"""Runs that others measured and published, beside memplan's predictions: a module for each kind of table."""
