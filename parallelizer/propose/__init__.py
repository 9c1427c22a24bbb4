"""`python -m parallelizer init`: a plan for a model that has none, from what its forward does.

One forward on meta tensors is watched (observe.py), with a note on every dimension of every tensor of what it is made of
(atoms.py, operators.py). Whatever may be split together comes out of that as roles (roles.py), roles become rules
(rules.py), rules become text (write_plan.py), and the text is tried as anybody else's plan would be: what the checks refuse is
taken back and said (retreat.py). Names of modules play no part.
"""
