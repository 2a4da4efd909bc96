"""Engines: training frameworks, played. `base` says what one is and finds it by its name."""
