"""A rendezvous for torch elastic with a single agent, on one machine.

torch's own rendezvous (`c10d`) connects agents of many machines. For a single agent it costs a random wait of
up to 0.3 s, a listening socket, and threads in a process that is about to fork. This one costs nothing.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

NAME = "parallelizer-lone"


class LoneRendezvous(RendezvousHandler):
    """Every round is complete at once, with one agent in it, which keeps what it stores to itself."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id

    def get_backend(self) -> str:
        """The name under which it is registered."""
        return NAME

    def next_rendezvous(self) -> RendezvousInfo:
        """A round of one. It offers the ranks no address: they meet in a file, see `rank`."""
        return RendezvousInfo(dist.HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        """Never: no other process uses it."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def num_nodes_waiting(self) -> int:
        """None, ever."""
        return 0

    def get_run_id(self) -> str:
        """The launch that this is for."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing is open."""
        return True


rendezvous_handler_registry.register(NAME, LoneRendezvous)
