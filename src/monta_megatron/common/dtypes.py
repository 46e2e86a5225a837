"""Dtypes of rows, by Megatron's names and by PyTorch's: files and flags take either."""

from typing import Literal

Dtype = Literal["float32", "bfloat16", "float16", "fp32", "bf16", "fp16"]

DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
}
_TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def torch_name(dtype: str) -> str:
    """PyTorch's name of a dtype."""
    return _TORCH_NAMES.get(dtype, dtype)
