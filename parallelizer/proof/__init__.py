"""The proof: the sharded run equals the unsharded one, in float64, gradient by gradient.

`prove` runs the model's tiny form twice, unsharded in one process and under the plan on real ranks, and
compares losses, gradients, updates, optimizer states and evaluation logits. Where they differ it says in
which module first, and how.
"""
