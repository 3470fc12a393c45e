"""Exact solvers: one sweep up and down the tree for a quadratic loss, Newton for any other."""
