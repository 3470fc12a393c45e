"""Tables for the terminal, figures, and the pages of the studies; the core does not import this package."""
