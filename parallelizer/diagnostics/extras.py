"""How the packages of an optional extra are installed, for the messages where one of them is missing."""

from __future__ import annotations


def installed_by(extra: str) -> str:
    """The command. The distribution is on no package index, so that the path of a clone stands for its name."""
    return f"pip install 'path/to/parallelizer[{extra}]', in which the path is that of a clone"
