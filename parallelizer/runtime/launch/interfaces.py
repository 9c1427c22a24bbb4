"""Finds the network interface of the route to another host, for gloo on machines with several interfaces.

By default gloo takes the address of the machine's own name. On many machines `/etc/hosts` gives that name a
loopback address (Debian's 127.0.1.1), and ranks on other nodes wait for a connection that cannot come.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_SIOCGIFADDR = 0x8915
_ELSEWHERE = ("203.0.113.1", "2001:db8::1")
"""Addresses reserved for documentation: the way to them is the default route. Nothing is sent."""


def loopback() -> str | None:
    """The name of this machine's own interface."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)


def leading_to(host: str, *, several_nodes: bool) -> str | None:
    """The interface by which packets to `host` would leave; None when it cannot be told.

    For a `host` that is this machine itself it is the interface that has this address. With several nodes it is
    never loopback: a head node that knows itself as 127.0.1.1 goes by the default route instead.
    """
    for goal in (host, *(_ELSEWHERE if several_nodes else ())):
        ours = _own_address(goal)
        if ours is not None and not (several_nodes and ipaddress.ip_address(ours).is_loopback):
            return next((name for name, address in _addresses() if address == ours), None)
    if several_nodes:
        return next((n for n, a in _addresses() if not ipaddress.ip_address(a).is_loopback), None)
    return None


def _own_address(host: str) -> str | None:
    """The address that packets to `host` would come from, as the kernel's routes have it."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as asking:
                asking.connect(address)  # of a datagram socket: only looks for a route
                return str(asking.getsockname()[0]).partition("%")[0]
        except OSError:
            continue
    return None


def _addresses() -> Iterator[tuple[str, str]]:
    """Interfaces with their addresses, one pair for each; of IPv4 the first of an interface alone (Linux)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
            except OSError:  # down, or without an address
                continue
            yield name, socket.inet_ntoa(answer[20:24])
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        digits, *_, name = line.split()
        yield name, str(ipaddress.IPv6Address(bytes.fromhex(digits)))
