"""What a rank on a GPU sets before it uses CUDA: its device, its cores, its threads, and torch's variables of the
environment.
"""

from __future__ import annotations

import os

import torch

from parallelizer.runtime.launch import numa

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The names of the allocator's settings, the second that of older releases of torch."""

_NCCL = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
"""NCCL's groups record so many collectives, and write them to a file after a timeout. torch's warning about serialized sends and
receives is off: each channel of a pipeline has its own group, in which both ranks have the same order.
"""

_OLDER = {"TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE"}
"""Their names in older releases of torch, which it still reads."""


def prepare_gpu_rank(local_rank: int, local_ranks: int) -> torch.device:
    """Make this process a rank on a GPU, and return its device: the GPU of its `local_rank`, or the only one that its
    launcher lets it see.

    The rank is bound to the cores near its GPU, unless the cores are chosen already: see `numa`. Variables that the user has
    set keep their values.
    """
    if not any(name in os.environ for name in _ALLOCATOR):
        # Segments that grow leave fewer gaps. It is read when CUDA is initialised.
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"
    for name, value in _NCCL.items():
        if _OLDER.get(name, name) not in os.environ:
            os.environ.setdefault(name, value)
    seen = max(1, torch.cuda.device_count())
    place = torch.device("cuda", local_rank % seen)
    # Before the device is used: memory of the host is then near it, and threads of CUDA run there.
    sharing = numa.bind_to_node_of(
        [numa.address(rank % seen) for rank in range(max(local_ranks, local_rank + 1))], local_rank
    )
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads(sharing))
    # Backward runs in this thread, whose stack tells where a rank stands. By default every GPU has a thread for it.
    torch.autograd.set_multithreading_enabled(False)
    torch.cuda.set_device(place)
    return place


def threads(ranks: int) -> int:
    """A rank's share of the cores that it may use, which `ranks` ranks share. A new process would take all of them, as would
    its neighbours.
    """
    return max(1, len(os.sched_getaffinity(0)) // max(1, ranks))
