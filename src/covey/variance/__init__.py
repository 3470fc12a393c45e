"""Penalties learned from the data."""
