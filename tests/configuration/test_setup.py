"""A model that cannot be built: the finding points at what broke it."""

from __future__ import annotations

import pytest

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config, from_overrides
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError


def refused(*overrides: str) -> Diagnostic:
    """The one finding about the model of a configuration."""
    with pytest.raises(PlanError) as caught:
        from_config(*compose_config(overrides)).build_model()
    [found] = caught.value.diagnostics
    assert found.code == "model-build"
    return found


@pytest.mark.parametrize(
    "override", ["model.n_heads=0", "model.dim=banana", "++model.dim=banana", "~model.dim"]
)
def test_an_argument_of_the_command_line_is_pointed_at(override: str) -> None:
    found = refused("parallel=tp2", override)
    assert found.span is not None and found.span.file == f"<override {override}>"
    assert found.related == ()


def test_of_several_arguments_all_are_shown() -> None:
    found = refused("model.dim=256", "model.plan=llama", "model=llama_debug", "model.n_heads=0")
    assert found.span is not None and found.span.file == "<override model.dim=256>"
    assert [r.span.file for r in found.related] == ["<override model.n_heads=0>"]


def test_a_class_that_is_not_there_is_no_fault_of_its_arguments() -> None:
    override = "model._target_=parallelizer.models.llama.Lama"
    found = refused("model.dim=128", override)
    assert found.span is not None and found.span.file == f"<override {override}>"


def test_without_arguments_on_the_command_line_the_class_is_pointed_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: object, **_: object) -> None:
        raise RuntimeError("no model today")

    monkeypatch.setattr("parallelizer.models.llama.Llama.__init__", broken)
    found = refused("parallel=tp2", "model.plan=llama")
    assert found.span is not None and found.span.file.endswith("llama_debug.yaml") and found.span.line == 2


def test_errors_of_codes_that_are_not_sure_are_findings_where_there_are_no_others() -> None:
    setup = from_overrides(["model=llama_debug", "parallel=fsdp2", "train.batch_size=3"])
    program = setup.compile(setup.build_model(), unsure={"batch-not-divisible", "local-positions"})
    assert [d.code for d in program.diagnostics if d.severity == "error"] == ["batch-not-divisible"]
    for unsure in (set(), {"local-positions"}):
        with pytest.raises(PlanError):
            setup.compile(setup.build_model(), unsure=unsure)
