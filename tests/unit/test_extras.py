"""What a message tells pip to install exists, and is what setup.py calls the extra."""

import re
from importlib.metadata import requires
from pathlib import Path

import pytest

from monta_megatron.tools import doctor, pictures

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(("extra", "says"), [("plot", pictures.INSTALL), ("te", doctor.INSTALL_TE)])
def test_an_extra_is_what_setup_says(extra: str, says: str) -> None:
    ending = re.compile(rf"""\s*; extra == ["']{extra}["']$""")
    wanted = requires("monta-megatron") or []
    libraries = [ending.sub("", text) for text in wanted if ending.search(text)]
    assert libraries == [says.removeprefix("pip install ").strip("'")]
