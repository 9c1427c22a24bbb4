"""What holds for every test."""

from __future__ import annotations

import torch

# Tests fork ranks, and a process that forks must not have run OpenMP threads: before the first operation.
torch.set_num_threads(1)
