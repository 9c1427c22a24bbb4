"""The output of a run: files, a live view, profiles, the comparison of its first step with the dry run, and
its summary.
"""
