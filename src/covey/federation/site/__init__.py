"""A site: its table, its node, its files, what it allows."""
