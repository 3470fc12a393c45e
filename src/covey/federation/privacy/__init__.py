"""Masks, differential privacy and its accounting."""
