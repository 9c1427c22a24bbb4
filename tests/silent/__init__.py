"""Right and wrong plans of models of people's own, judged by the gradients of an independent run.

`python -m tests.silent` measures `validate` and `verify` with them: how many right plans they accept, and how many of
the wrong ones, most of which run and print a plausible loss, they refuse.

    models/     the models and losses, as people write them
    cases/      plans for them, with the verdict that is expected on each preset: right, wrong (runs, and gradients or
                buffers differ) or fails (a rank raises)
    judge.py    compares real ranks with an unsharded run
    tools.py    asks `validate` and `verify`, as a user would, by a configuration folder
    table.py    counts, and names what they miss

A new case is a line in a file of `cases/`. The judge decides whether its expectation is right.
"""
