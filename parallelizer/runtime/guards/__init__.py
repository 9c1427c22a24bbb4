"""Guards of a run: they detect values that are not finite, ranks at different steps, and ranks whose values
drift apart.

    done = pz.train_step(model, parts, loss, optimizer, clip, skip_nonfinite=True)
    if done.skipped is not None:
        found = find_nonfinite(model, parts, loss, done.skipped)

A guard only detects and reports. The training loop decides what follows.
"""
