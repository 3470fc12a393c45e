"""Engines that hold tables or run nodes: DuckDB and Ray. The core imports none of them."""
