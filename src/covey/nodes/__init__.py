"""Nodes that hold clients' rows, the messages they answer, and networks of nodes."""
