"""Several nodes on one machine: network namespaces, joined by a bridge of veth pairs. It takes root and iproute2."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.recipes.runs import ROOT


def missing() -> str | None:
    """Why there can be no such nodes here; None when there can."""
    if os.geteuid() != 0:
        return "network namespaces are made by root alone"
    if shutil.which("ip") is None:
        return "ip not found: apt-get install iproute2"
    name = f"pz{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
    return None


class Nodes:
    """Namespaces that reach each other and nothing else. Each has loopback, and `eth0` with an address of its own."""

    def __init__(self, count: int) -> None:
        self.names = [f"pz{os.getpid()}-{n}" for n in range(count)]
        self.addresses = [f"10.77.0.{n + 1}" for n in range(count)]
        self._started: list[subprocess.Popen[str]] = []

    def make(self) -> None:
        """Raises CalledProcessError; `remove` cleans up then too."""
        middle = f"{self.names[0]}-m"
        self.names.append(middle)
        for name in self.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", middle, "link", "add", "bridge", "type", "bridge")
        _ip("-n", middle, "link", "set", "bridge", "up")
        for number, (name, address) in enumerate(zip(self.names, self.addresses, strict=False)):
            port = f"port{number}"
            _ip("-n", middle, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", middle, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")

    def start(self, node: int, words: Sequence[str], cwd: Path, **environment: str) -> subprocess.Popen[str]:
        """A command of Python's on a node, in a session of its own; stdout and stderr are in one pipe."""
        command = ["ip", "netns", "exec", self.names[node], sys.executable, *words]
        variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
        started = subprocess.Popen(
            command, cwd=cwd, env=variables, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._started.append(started)
        return started

    def processes(self, node: int) -> list[int]:
        """Every process that runs on a node."""
        ended = subprocess.run(["ip", "netns", "pids", self.names[node]], capture_output=True, text=True)
        return [int(word) for word in ended.stdout.split()]

    def remove(self) -> None:
        """End what runs on the nodes, and take them away."""
        for node, name in enumerate(self.names):
            for process in self.processes(node):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        for started in self._started:
            if started.stdout is not None:
                started.stdout.close()
            started.wait(10)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
