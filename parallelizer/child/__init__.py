"""Functions in child processes of this one: forked, or new processes where this one has used CUDA."""
