"""Certificates: made of a proof that passed, found while nothing has changed, and refused when any part has."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parallelizer.configuration.read_setup import from_overrides
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.language.plan import Mesh
from parallelizer.proof import certificate as certificates
from parallelizer.proof import fingerprint as fingerprints
from parallelizer.proof.certificate import Certificate, find, told, write
from parallelizer.proof.fingerprint import PARTS, parts_of
from tests.simulate.setups import in_float8

MODEL = """
import torch
from torch import nn
from helper import scale

class Net(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)

    def forward(self, x):
        return scale(self.up(x))

def loss(output, batch):
    return output.sum(), batch["x"].numel()
"""


@pytest.fixture(scope="module")
def shipped() -> Setup:
    return from_overrides(["parallel=tp8_cp2"])


def certificate(setup: Setup) -> Certificate:
    return Certificate(
        parts=parts_of(setup, setup.build_model()),
        plan=setup.plan.name,
        model=str(setup.model["_target_"]),
        mesh={"cp": 2, "tp": 8},
        ran={"cp": 2, "tp": 2},
        worst=0.05,
        of="norm.weight",
        losses=(5.5, 5.5),
        date="2026-01-02T03:04:05+00:00",
        changes=("tp 8 -> 2",),
    )


def test_what_was_written_is_found(shipped: Setup, tmp_path: Path) -> None:
    made = certificate(shipped)
    file = write(made, tmp_path / "proofs")
    assert [file] == list((tmp_path / "proofs").iterdir())
    found = find(shipped, shipped.build_model(), tmp_path / "proofs")
    assert found.certificate == made
    assert told(found) == f"proven on 2026-01-02 (certificate {made.name}, worst error 0.05 of its bound)"
    again = from_overrides(["parallel=tp8_cp2"])  # read anew, and other sizes of the same axes
    assert find(again, again.build_model(), file.parent).certificate == made
    small = dataclasses.replace(again, mesh=Mesh({"cp": 4, "tp": 2}))
    assert find(small, small.build_model(), file.parent).certificate == made


def changed_rule(setup: Setup) -> Setup:
    return dataclasses.replace(setup, plan=dataclasses.replace(setup.plan, rules=setup.plan.rules[:-1]))


CHANGES: dict[str, Callable[[Setup], Setup]] = {
    "plan": changed_rule,
    "styles": lambda s: from_overrides(["parallel=tp8_cp2", "++parallel.styles.fsdp.min_size=7"]),
    "model": lambda s: dataclasses.replace(s, model={**s.model, "rope_theta": 1.0}),
    "loss": lambda s: dataclasses.replace(s, loss_path="torch.nn.functional.mse_loss"),
    "batch": lambda s: dataclasses.replace(s, workload=dataclasses.replace(s.workload, accumulate=2)),
    "length": lambda s: dataclasses.replace(s, workload=dataclasses.replace(s.workload, seq_len=254)),
    "optimizer": lambda s: dataclasses.replace(s, optim={**s.optim, "weight_decay": 0.7}),
}


@pytest.mark.parametrize("part", CHANGES)
def test_a_part_of_the_setup_that_changed_is_named(part: str, shipped: Setup, tmp_path: Path) -> None:
    write(certificate(shipped), tmp_path)
    after = CHANGES[part](shipped)
    found = find(after, shipped.build_model(), tmp_path)
    assert found.certificate is None
    assert PARTS[part] in found.changed and len(found.changed) <= 2, found.changed
    assert PARTS[part] in told(found)


def test_other_axes_have_a_certificate_of_their_own(shipped: Setup, tmp_path: Path) -> None:
    write(certificate(shipped), tmp_path)
    alone = dataclasses.replace(shipped, mesh=Mesh({"tp": 8}))
    found = find(alone, alone.build_model(), tmp_path)
    assert found.certificate is None and found.before is None and told(found) == "not proven"


def test_a_proof_is_of_one_schedule_with_any_number_of_microbatches(tmp_path: Path) -> None:
    def piped(*more: str) -> Setup:
        return from_overrides(["parallel=pp2", "model.n_layers=4", *more])

    made = certificate(piped())
    write(made, tmp_path)
    more = piped("parallel.pipeline.microbatches=8")
    assert find(more, more.build_model(), tmp_path).certificate == made
    for override in ("schedule=zbv", "schedule=gpipe"):
        other = piped(f"parallel.pipeline.{override}")
        found = find(other, other.build_model(), tmp_path)
        assert found.certificate is None and found.changed == (PARTS["pipeline"],), override


@pytest.mark.parametrize(
    ("part", "where", "name", "value"),
    [
        ("torch", "torch", "__version__", "9.9"),
        ("python", "platform", "python_version", lambda: "9.9"),
        ("parallelizer", None, "package_digest", lambda: "other"),
    ],
)
def test_a_version_that_changed_is_named(
    part: str, where: str | None, name: str, value: Any, shipped: Setup, tmp_path: Path, monkeypatch: Any
) -> None:
    write(certificate(shipped), tmp_path)
    monkeypatch.setattr(getattr(fingerprints, where) if where else fingerprints, name, value)
    assert find(shipped, shipped.build_model(), tmp_path).changed == (PARTS[part],)


def test_every_part_has_a_test_that_changes_it() -> None:
    others = {"axes", "pipeline", "torch", "python", "parallelizer", "sources", "own styles", "packages"}
    assert {*CHANGES, *others} == set(PARTS)


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "helper.py").write_text("def scale(x):\n    return x\n")
    (tmp_path / "unrelated.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("net", "helper"):
        sys.modules.pop(name, None)


def test_a_source_file_that_the_model_imports_is_part_of_it(
    own_model: Path, shipped: Setup, tmp_path: Path
) -> None:
    own = {"_target_": "net.Net", "plan": shipped.model.get("plan")}
    mine = dataclasses.replace(shipped, model=own, loss_path="net.loss")
    model = mine.build_model()
    write(certificate(mine), tmp_path / "proofs")
    (own_model / "unrelated.py").write_text("x = 1\n")
    assert find(mine, model, tmp_path / "proofs").certificate is not None
    (own_model / "helper.py").write_text("def scale(x):\n    return 2 * x\n")
    assert find(mine, model, tmp_path / "proofs").changed == (PARTS["sources"],)


def test_the_source_file_of_a_style_of_ones_own_is_part_of_it(
    own_model: Path, shipped: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    style, file = shipped.plan.rules[0].uses[0].style, own_model / "helper.py"
    own = SimpleNamespace(__module__="helper")
    monkeypatch.setattr(fingerprints, "STYLE_FILES", [s for s in fingerprints.STYLE_FILES if s != style])
    monkeypatch.setattr(fingerprints, "FUNCTIONS", {style: own})
    write(certificate(shipped), tmp_path / "proofs")
    file.write_text("def scale(x):\n    return 2 * x\n")
    model = shipped.build_model()
    assert find(shipped, model, tmp_path / "proofs").changed == (PARTS["own styles"],)


@pytest.mark.parametrize("package", ["transformers", "torchao"])
def test_another_version_of_a_package_that_computes_is_another_proof(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module's class imports functions of other files of its package, and a style those of torchao."""
    pytest.importorskip(package)
    words = ["model=hf_llama"] if package == "transformers" else [in_float8("tensorwise")]
    setup = from_overrides(["parallel=tp2", *words])
    model = setup.build_model()
    write(certificate(setup), tmp_path)
    assert find(setup, model, tmp_path).certificate is not None
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "9.9" if name == package else version(name)
    )
    assert find(setup, model, tmp_path).changed == (PARTS["packages"],)


def test_a_damaged_or_changed_file_is_no_certificate(shipped: Setup, tmp_path: Path) -> None:
    file = write(certificate(shipped), tmp_path)
    whole = file.read_text()
    model = shipped.build_model()
    for text in ("", "[]", whole[:50], whole.replace('"format": 1', '"format": 2')):
        file.write_text(text)
        assert find(shipped, model, tmp_path).certificate is None
    document = json.loads(whole)
    document["parts"]["torch"] = "0" * 64  # the parts no longer make the fingerprint
    file.write_text(json.dumps(document))
    assert find(shipped, model, tmp_path).certificate is None


def test_a_folder_that_cannot_be_written_to_is_told_and_nothing_is_left(
    shipped: Setup, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError) as raised:
        write(certificate(shipped), tmp_path / "file" / "proofs")
    assert raised.value.diagnostics[0].code == "certificate-not-written"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_fingerprint_does_not_depend_on_where_a_rule_stands(shipped: Setup, tmp_path: Path) -> None:
    text = Path(shipped.plan.file).read_text()
    moved = tmp_path / "llama.yaml"
    moved.write_text("# a comment\n\n" + text)
    other = from_overrides(["parallel=tp8_cp2", f"plan={moved}"])
    model = shipped.build_model()
    assert parts_of(other, model)["plan"] == parts_of(shipped, model)["plan"]


def test_a_proof_that_failed_has_none(shipped: Setup) -> None:
    class Failed:
        is_verdict, passed = True, False

    with pytest.raises(ValueError, match="passed"):
        certificates.certificate_of(Failed(), shipped, {})  # type: ignore[arg-type]
    assert math.isfinite(certificate(shipped).worst)
