"""Functions by dotted path, and the words for paths that name none."""

from __future__ import annotations

import importlib
import logging
import os.path
from pathlib import Path

import pytest

import parallelizer.losses  # noqa: F401  a module that is loaded is proposed
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.dotted_path import function_at, object_at
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics.diagnostic import PlanError


def test_what_a_path_names() -> None:
    assert function_at("os.path.join") is os.path.join
    assert function_at("pathlib.Path.joinpath") is Path.joinpath
    assert object_at("os") is os and object_at("os.path") is os.path


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere.build", "there is no module 'nowhere'"),
        (
            "parallelizer.losses.cross_entrop",
            "parallelizer.losses has no 'cross_entrop'; did you mean cross_entropy?",
        ),
        ("parallelizer.loses.cross_entropy", "parallelizer has no 'loses'; did you mean losses?"),
        ("os.path.nothing", "os.path has no 'nothing'"),
        ("os.sep", "it names a str"),
        ("os..sep", "'os..sep' is not a dotted path"),
        ("", "'' is not a dotted path"),
    ],
)
def test_a_path_that_names_no_function(path: str, said: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        function_at(path)
    assert str(caught.value) == said


def test_a_package_that_is_imported_already_has_modules_that_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "outer_located_test" / "inner"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").touch()
    (inner / "__init__.py").touch()
    (inner / "leaf.py").write_text("def f(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("outer_located_test.inner")
    assert function_at("outer_located_test.inner.leaf.f").__name__ == "f"


def test_a_module_that_lacks_another_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lacking_located_test.py").write_text("import not_there_located_test\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="not_there_located_test"):
        function_at("lacking_located_test.f")


def test_the_loss_of_a_configuration(caplog: pytest.LogCaptureFixture) -> None:
    """One account of it: nothing is logged beside."""
    setup = from_config(*compose_config(["model.loss=parallelizer.losses.cross_entropi"]))
    with caplog.at_level(logging.DEBUG), pytest.raises(PlanError) as caught:
        setup.loss()
    assert caplog.records == []
    [found] = caught.value.diagnostics
    assert found.message == (
        "model.loss=parallelizer.losses.cross_entropi is not a function: "
        "parallelizer.losses has no 'cross_entropi'; did you mean cross_entropy?"
    )
