"""The mutation suite: every shipped plan, broken in each of the ways a person breaks one, judged by `validate` and
by a proof.
"""
