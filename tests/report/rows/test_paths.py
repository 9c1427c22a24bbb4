"""Paths as tables show them stand for just the paths that they were made of."""

from __future__ import annotations

from parallelizer.language.glob import parse_glob
from parallelizer.report.rows.paths import ROOT, shown_paths


def test_paths_are_folded_and_the_root_has_a_name() -> None:
    paths = ["", "layers.0.wq", "layers.1.wq", "norm"]
    shown = shown_paths(paths)
    assert ROOT in shown and "layers.{0,1}.wq" in shown
    named = [glob for glob in shown if glob != ROOT]
    assert sorted(n for glob in named for n in parse_glob(glob).select(paths)) == paths[1:]
