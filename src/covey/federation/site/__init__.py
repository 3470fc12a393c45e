"""A site: its table, its policy, what it remembers of a run, and how it answers messages."""
