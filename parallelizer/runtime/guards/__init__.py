"""What watches over a run: numbers that are not finite, ranks out of step, and ranks that drift apart.

    done = pz.train_step(model, parts, loss, optimizer, clip, skip_nonfinite=True)
    if done.skipped is not None:
        found = find_nonfinite(model, parts, loss, done.skipped)

Each looks and tells; what to do about it is the training loop's to say.
"""
