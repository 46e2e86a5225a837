"""How to install what this package can do without: the extras of setup.py.

No index holds this package yet, so no message may tell pip to fetch it by name: whoever takes that
name could answer. What an extra consists of can be installed wherever this package came from.
"""

LIBRARIES = {
    "te": ("transformer-engine[pytorch]",),
    "plot": ("matplotlib",),
}


def install(extra: str) -> str:
    """The command that installs the libraries of an extra, from a checkout and a wheel alike."""
    quoted = (f"'{library}'" if "[" in library else library for library in LIBRARIES[extra])
    return f"pip install {' '.join(quoted)}"
