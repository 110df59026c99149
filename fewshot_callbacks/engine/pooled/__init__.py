"""Counts of all pairs together, regardless of the query, at and between thresholds."""
