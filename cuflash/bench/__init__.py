"""Measured comparisons against whatever peers can be imported."""
