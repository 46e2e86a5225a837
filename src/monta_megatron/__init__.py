"""Pipelined, topology-aware expert-parallel token dispatch for Megatron-Core.

Importing this package imports neither torch nor Megatron.
"""

__version__ = "0.1.0"

__all__ = ["__version__", "register"]


def register() -> None:
    """Make Megatron-Core know `moe_token_dispatcher_type="monta"`.

    Needed only where the package's autoload is switched off (MONTA_AUTOLOAD=0), or Megatron runs
    from a source that PyTorch's autoload does not reach. Calling it twice is harmless.

    Raises:
        ImportError: Megatron-Core is not installed.
        ValueError: its version is outside the range that this package was tested with.
    """
    from monta_megatron.integration import registration

    registration.register()
