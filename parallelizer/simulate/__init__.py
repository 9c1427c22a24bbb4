"""The dry run: the real program on a fake world.

`trace` applies the compiled program to the real model under fake tensors and PyTorch's fake process group,
runs the public `train_step` with the configured optimizer, and records every collective (`ledger`) and every
allocation (`memory`).
"""
