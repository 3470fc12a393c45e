"""Engines that hold tables: DuckDB. The core imports none of them."""
