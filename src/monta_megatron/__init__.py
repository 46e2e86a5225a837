"""Pipelined, topology-aware expert-parallel token dispatch for Megatron-Core.

Importing this package imports neither torch nor Megatron.
"""

__version__ = "0.1.0"

__all__ = ["__version__", "register"]


def register() -> None:
    """Make Megatron-Core accept `moe_token_dispatcher_type="monta"`.

    Needed only if autoload is switched off (MONTA_AUTOLOAD=0 or TORCH_DEVICE_BACKEND_AUTOLOAD=0) or
    this package is on the path but not installed. Calling it twice is harmless.

    Raises:
        ImportError: Megatron-Core is not installed.
        ValueError: its version is outside the range that this package was tested with.
    """
    from monta_megatron.integration import registration

    registration.register()
