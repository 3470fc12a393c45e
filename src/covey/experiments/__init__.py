"""Worked studies on data, one module each."""
