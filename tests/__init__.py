"""Tests: published formulas, laws, replayed measurements."""
