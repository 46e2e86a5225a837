"""Below all other rooms."""

__version__ = "0.1.0"
