"""Penalties, the objective, and the constants, rates and bounds of the theory."""
