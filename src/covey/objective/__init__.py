"""The penalties, the objective, and the theory that bounds and constants come from."""
