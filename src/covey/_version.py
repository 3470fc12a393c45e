"""The version, where the core can read it without importing the package's root."""

__version__ = "0.1.0"
