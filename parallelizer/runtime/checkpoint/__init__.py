"""Checkpoints of a run: whole or not there, of whole tensors in the model's own layout, so that any plan can go on from them.

saving      copies what this rank holds, and writes it beside the training: `step_N.tmp`, then `step_N`
loading     hashes first, then reads what this rank holds under its own plan
contents    which tensors of model and optimizer a rank holds, and which part of each it writes
planning    the same for torch.distributed.checkpoint, whose format the files have
hashed      files that are hashed while they are written, and read back
manifest    the SHA-256 of every file
folder      names, the newest, which are kept
fit         whether a checkpoint is one of this model
"""
