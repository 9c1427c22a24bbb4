"""The hooks around an optimizer's step. See `parallelizer.torch_private`."""

from __future__ import annotations

from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether `step()` also runs functions that were registered for this optimizer or for all. torch has functions that register
    them, and none that lists them. Waits for a public question.
    """
    return any(
        (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
            _global_optimizer_pre_hooks,
            _global_optimizer_post_hooks,
        )
    )
