"""The dry run: one step of the real program on a fake world, under fake tensors and PyTorch's fake process group.

`follow/` runs one forward and backward and follows how tensors lie. `record/` runs whole training steps and records every
collective and every allocation. `checks/` turns what was seen into findings, one file each, in the order of `all_checks.py`.
`validate.py` puts all findings together.
"""
