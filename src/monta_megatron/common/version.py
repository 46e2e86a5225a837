"""The version of this package, importable from below; a file of its own, as it imports nothing."""

__version__ = "0.1.0"
