"""A launch that Triton has bound before is given what Triton itself would give it."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton, which comes with torch's GPU wheels")

from compiled_kernels import no_driver
from fake_world import empty_copies
from triton.compiler.compiler import LazyDict

from monta_megatron.chains.stages import Parts
from monta_megatron.exchange.buffers import Columns
from monta_megatron.exchange.kernels import tiles
from monta_megatron.exchange.kernels.copies import duplicate

HIDDEN = 32
PARTS = Parts(first=0, size=1, num_parts=4)


@pytest.mark.skipif(not tiles.LAUNCHES_VARIANTS, reason="this Triton binds every launch")
def test_a_variant_is_launched_as_its_kernel_is() -> None:
    launched: list[tuple[Any, ...]] = []
    launches: tiles.Launches = {}
    into = torch.zeros(9, HIDDEN, dtype=torch.bfloat16)
    columns = Columns(rows=torch.zeros(6, HIDDEN, dtype=torch.bfloat16))
    with no_driver(lambda *arguments: launched.append(arguments)):
        for num_copies in (9, 9, 5):
            copies = empty_copies(6, num_copies, PARTS, into.device)
            duplicate(columns, copies, Columns(rows=into), launches=launches)
            # Triton, which looks variants up, is asked for the first.
            launches["duplicate"].kernel = None
    assert len(launches) == 1 and len(launched) == 3
    by_triton, by_variant = launched[:2]
    for expected, actual in zip(by_triton, by_variant, strict=True):
        if isinstance(expected, torch.Tensor):
            assert actual.shape == expected.shape
        elif not isinstance(expected, LazyDict):
            # That describes a launch to profilers, and is made for each.
            assert actual == expected
