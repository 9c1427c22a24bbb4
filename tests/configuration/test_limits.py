"""What a configuration may come to, before anything is built from it."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.limits import (
    MAX_OVERRIDES,
    MAX_PRESET_NODES,
    _may_be_too_much,
    check_files,
    check_overrides,
    grown_key,
    measure,
)
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.language.yaml_nodes import MAX_BYTES
from tests.fuzz.corpus import PRESETS
from tests.fuzz.mutations import mutated

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{n}: &{n} [{','.join([f'*{chr(ord(n) - 1)}'] * 9)}]\n" for n in "bcdefg"
)


def refused(folder: Path, *overrides: str) -> str:
    with pytest.raises(PlanError) as caught:
        from_config(*compose_config(overrides, str(folder)))
    [found] = caught.value.diagnostics
    assert found.code == "yaml-limit" and found.help and found.span is not None
    return f"{Path(found.span.file).name}:{found.span.line}: {found.message}"


def preset(folder: Path, text: str, name: str = "ours") -> Path:
    (folder / "parallel").mkdir(exist_ok=True)
    (folder / "parallel" / f"{name}.yaml").write_text(text)
    return folder


def test_aliases_are_counted_as_often_as_they_are_written_out(tmp_path: Path) -> None:
    began = time.process_time()
    assert "1,500 values with its aliases" in refused(preset(tmp_path, f"x:\n  {BOMB[:-1]}"), "parallel=ours")
    assert time.process_time() - began < 1


@st.composite
def documents(draw: st.DrawFn) -> str:
    """Maps in which later entries repeat earlier ones."""
    lines, names = [], list[str]()
    for number in range(draw(st.integers(1, 6))):
        items = draw(st.lists(st.sampled_from(["x", "[y, z]", *(f"*{n}" for n in names)]), max_size=4))
        lines.append(f"k{number}: &a{number} [{', '.join(items)}]")
        names.append(f"a{number}")
    return "\n".join(lines) + "\n"


def nodes(value: object) -> int:
    """As PyYAML builds it: every list, map, key and scalar, as often as it is reached."""
    if isinstance(value, dict):
        return 1 + sum(1 + nodes(below) for below in value.values())
    return 1 + sum(map(nodes, value)) if isinstance(value, list) else 1


@settings(max_examples=50, deadline=None)
@given(documents())
def test_the_count_is_that_of_what_pyyaml_builds(text: str) -> None:
    count = nodes(yaml.safe_load(text))
    assert measure(text, "f", count) is None
    assert measure(text, "f", count - 1) is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: " + "[" * 40 + "]" * 40, "more than 32 levels"),
        ("".join(" " * n + "a:\n" for n in range(40)), "more than 32 levels"),
        ("- " * 40 + "a", "more than 32 levels"),
        ("? " * 40 + "a", "more than 32 levels"),
        ("a: [" + "b," * 3000 + "]", "more than 1,500 values"),
        ("\n".join(f"a{n}: b" for n in range(3000)), "more than 1,500 values"),
        ("a: &a " + "x" * 100_000 + "\nb: [*a, *a]\n", "more than 250,000 characters"),
        ("#" * 250_001, "larger than 250,000 bytes"),
    ],
)
def test_a_preset_that_is_too_much_is_refused_before_it_is_built(
    tmp_path: Path, text: str, message: str
) -> None:
    assert message in refused(preset(tmp_path, text), "parallel=ours")


def test_what_nobody_asks_for_is_not_even_opened(tmp_path: Path) -> None:
    preset(tmp_path, BOMB, "unasked")
    compose_config(["parallel=tp2"], str(tmp_path))
    # But for one that another file names.
    preset(tmp_path, "defaults: [unasked]\n")
    assert "unasked.yaml" in refused(tmp_path, "parallel=ours")


def test_what_is_not_looked_into_is_never_too_much() -> None:
    rng, passed = random.Random(3), 0
    for _ in range(300):
        text = mutated(rng.choice(PRESETS).read_bytes(), rng).decode(errors="replace")
        if len(text) < MAX_BYTES and not _may_be_too_much(text):
            passed += 1
            found = measure(text, "f", MAX_PRESET_NODES)
            assert found is None, text[:2000]
    assert passed > 50


def test_measuring_is_quick(tmp_path: Path) -> None:
    for number in range(300):
        preset(tmp_path, "mesh: {tp: 2}\n", f"p{number}")
    began = time.process_time()
    check_files([tmp_path], ["parallel=p7"], "train")
    assert time.process_time() - began < 0.1


def interpolated(height: int, reference: str) -> dict[str, object]:
    tree: dict[str, object] = {f"a{n}": reference.replace("N", f"a{n + 1}") for n in range(height)}
    return tree | {f"a{height}": "xxxxxxxxxx"}


@pytest.mark.parametrize("reference", ["${N}${N}", "${N}, ${N}", "${oc.decode:${N}${N}}", "${.N}${.N}"])
def test_interpolations_are_counted_as_often_as_they_are_filled_in(reference: str) -> None:
    assert grown_key(interpolated(5, reference)) is None
    began = time.process_time()
    assert grown_key(interpolated(60, reference)) is not None
    assert time.process_time() - began < 0.5


def test_maps_are_counted_with_what_is_in_them() -> None:
    tree: dict[str, object] = {f"a{n}": {"b": f"${{a{n + 1}}}", "c": [f"${{a{n + 1}}}"]} for n in range(40)}
    assert grown_key({**tree, "a40": {"d": 1}}) is not None
    small = {**{f"a{n}": tree[f"a{n}"] for n in range(6)}, "a6": {"d": 1}}
    assert grown_key(small) is None
    assert str(OmegaConf.to_container(OmegaConf.create(small), resolve=True)).count("'d': 1") > 2**6


def test_a_circle_is_left_to_omegaconf() -> None:
    assert grown_key({"a": "${b}", "b": "${a}", "c": "${c}", "d": {"e": "${d}"}, "f": "${nothing}"}) is None


def test_a_configuration_that_interpolations_blow_up_is_refused(tmp_path: Path) -> None:
    lines = "".join(
        f"  l{n}: ${{parallel.layouts.l{n + 1}}}${{parallel.layouts.l{n + 1}}}\n" for n in range(30)
    )
    found = refused(preset(tmp_path, f"defaults: [base]\nlayouts:\n{lines}  l30: x\n"), "parallel=ours")
    assert found.startswith("ours.yaml:") and "after its interpolations are resolved" in found


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rules=" + "[" * 40 + "]" * 40, "nested deeper than 32 levels"),
        ("rules=" + "choice(" * 40 + ")" * 40, "nested deeper than 32 levels"),
        ("rules=['" + "a" * MAX_OVERRIDES + ": fsdp']", "longer than 20,000 characters"),
    ],
)
def test_overrides_are_measured_before_hydra_reads_them(override: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_overrides(["parallel=tp2", override])
    check_overrides(["rules=['layers.{0..3}.{a,b}: {style: fsdp}']"] * 100)
