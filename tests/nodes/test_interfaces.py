"""The network interface that leads to another node is found, on machines whose own name leads nowhere too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from parallelizer.runtime.launch import interfaces
from tests.nodes.network import Nodes
from tests.recipes.runs import ROOT

pytestmark = pytest.mark.ranks  # it starts processes on nodes

ASK = """
import runpy, sys
found = runpy.run_path(sys.argv[1])
print([found["leading_to"](host, several_nodes=True) for host in sys.argv[2:]])
"""


def test_between_two_nodes(nodes: Nodes, tmp_path: Path) -> None:
    """To the other node, to itself by its address and by a name that is loopback, and by one that nobody has."""
    module = str(
        ROOT / "parallelizer" / "runtime" / "launch" / "interfaces.py"
    )  # alone: the package takes torch
    hosts = [*nodes.addresses, "localhost", "nobody.invalid"]
    for node in (0, 1):
        asked = nodes.start(node, ["-c", ASK, module, *hosts], tmp_path)
        written, _ = asked.communicate(timeout=60)
        assert written.strip() == str(["eth0"] * 4)


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces have other names elsewhere")
def test_on_one_node() -> None:
    assert interfaces.loopback() == "lo"
    assert interfaces.leading_to("127.0.0.1", several_nodes=False) == "lo"
    assert interfaces.leading_to("nobody.invalid", several_nodes=False) is None
