"""What a message tells pip to install exists, and is what setup.py calls the extra."""

import re
from importlib.metadata import requires

import pytest

from monta_megatron.common import presets


@pytest.mark.parametrize("extra", presets.LIBRARIES)
def test_an_extra_is_what_setup_says(extra: str) -> None:
    ending = re.compile(rf"""\s*; extra == ["']{extra}["']$""")
    wanted = requires("monta-megatron") or []
    libraries = [ending.sub("", text) for text in wanted if ending.search(text)]
    assert sorted(libraries) == sorted(presets.LIBRARIES[extra])
    for library in libraries:
        assert library in presets.install(extra)
