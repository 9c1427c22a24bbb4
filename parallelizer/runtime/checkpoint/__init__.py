"""Checkpoints of a run. A checkpoint is complete or absent. It contains whole tensors, so that any plan can
load it.

saving      copies the tensors of this rank and writes them in the background: `step_N.tmp`, then `step_N`
loading     checks the hashes, then reads the tensors that this rank holds under its own plan
contents    the tensors of model and optimizer that a rank holds, and the part of each that it writes
planning    the same for torch.distributed.checkpoint, which defines the format of the files
hashed      files that are hashed while they are written, and read back
manifest    the SHA-256 of every file
folder      names, the newest checkpoint, the checkpoints to keep
fit         whether a checkpoint fits this model
"""
