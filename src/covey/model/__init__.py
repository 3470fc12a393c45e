"""A fitted model: predictions, intervals, updates, summary, files."""
