"""Masks for secure aggregation, and differential privacy."""
