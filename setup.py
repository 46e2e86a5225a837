from pathlib import Path

from setuptools import find_packages, setup

plot = ["matplotlib"]
completion = ["shtab"]
test = ["pytest>=8", "hypothesis>=6", "pytest-timeout>=2.3", *plot, *completion]

setup(
    name="monta-megatron",
    version="0.1.0",
    description="Pipelined, topology-aware expert-parallel token dispatch for Megatron-Core",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    package_dir={"": "src", "monta_megatron.configs": "configs"},
    packages=[*find_packages("src"), "monta_megatron.configs"],
    package_data={
        "monta_megatron.tools.launch": ["start.sh"],
        "monta_megatron.configs": ["*/*.yaml"],
    },
    install_requires=["torch>=2.6", "megatron-core>=0.16,<0.20", "numpy", "pyyaml", "rich"],
    extras_require={
        "te": ["transformer-engine[pytorch]"],
        "plot": plot,
        "completion": completion,
        "test": test,
        "dev": [*test, "ruff==0.17.5", "mypy==2.4.1", "types-PyYAML"],
    },
    entry_points={
        "console_scripts": ["monta = monta_megatron.cli:main"],
        "torch.backends": ["monta_megatron = monta_megatron.autoload:activate"],
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
