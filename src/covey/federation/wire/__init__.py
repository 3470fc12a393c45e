"""What travels between sites and their operator, as bytes, and what carries it."""
