"""`python -m parallelizer.codes > docs/diagnostics.md`."""

import os
import sys

from parallelizer.codes.page import page

if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)  # traced examples fork, and an OpenMP region before a fork hangs the child
    sys.path[:] = [path or os.getcwd() for path in sys.path]  # the examples change the working directory
    sys.stdout.write(page())
