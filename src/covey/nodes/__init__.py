"""Nodes hold the rows of clients and answer messages; networks connect nodes with a coordinator."""
