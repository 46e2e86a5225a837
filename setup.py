"""What pip needs to know.

A release is built with MONTA_PROJECT_URL, which says where the repository lies, as
https://HOST/GROUP/NAME: the links and pictures of the description then lead to the release's tag.
Without it no host is assumed, and their texts alone are left.
"""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

VERSION = "0.1.0"
URL = os.environ.get("MONTA_PROJECT_URL", "").rstrip("/")

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:)([^)]+)\)")


def without_relative_links(page: str) -> str:
    """A page as it can be read outside of the repository."""

    def replaced(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        kind = "raw" if picture else "blob"
        return f"{picture}[{text}]({URL}/{kind}/v{VERSION}/{target})" if URL else text

    return LINK.sub(replaced, page)


plot = ["matplotlib"]
test = [
    *("pytest>=8", "hypothesis>=6", "pytest-timeout>=2.3", "tensorboard"),
    "einops",  # Megatron: an optimizer in several instances
    *plot,
]

setup(
    name="monta-megatron",
    version=VERSION,
    description="Pipelined, topology-aware expert-parallel token dispatch for Megatron-Core",
    long_description=without_relative_links(
        Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    ),
    long_description_content_type="text/markdown",
    author="The monta-megatron authors",
    license="Apache-2.0",
    keywords="mixture-of-experts moe expert-parallelism megatron alltoall distributed nccl",
    project_urls={
        "Source": URL,
        "Documentation": f"{URL}/blob/v{VERSION}/docs/README.md",
        "Changelog": f"{URL}/blob/v{VERSION}/CHANGELOG.md",
        "Issues": f"{URL}/issues",
    }
    if URL
    else {},
    python_requires=">=3.10",
    package_dir={"": "src", "monta_megatron.configs": "configs"},
    packages=[*find_packages("src"), "monta_megatron.configs"],
    package_data={
        "monta_megatron.tools.launch": ["start.sh"],
        "monta_megatron.configs": ["*/*.yaml", "*/*/*.csv"],
    },
    install_requires=["torch>=2.6", "megatron-core>=0.16,<0.21", "numpy", "pyyaml"],
    extras_require={
        "te": ["transformer-engine[pytorch]"],
        "plot": plot,
        "test": test,
        "dev": [*test, "ruff==0.17.5", "mypy==2.4.1", "types-PyYAML", "coverage>=7.10"],
    },
    entry_points={
        "console_scripts": ["monta = monta_megatron.cli:main"],
        "torch.backends": ["monta_megatron = monta_megatron.autoload:activate"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
    ],
)
