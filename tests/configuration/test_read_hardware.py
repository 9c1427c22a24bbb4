"""The keys of a hardware configuration: unknown keys and impossible values are refused at their lines."""

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.origins import Origins
from parallelizer.configuration.read_hardware import HARDWARE_KEYS, POSITIVE, read_hardware
from parallelizer.configuration.reading import Reading
from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.simulate.time.kernel_table import shipped_tables

SHIPPED = Path(__file__).resolve().parents[2] / "parallelizer" / "configs" / "hardware"


@functools.cache
def composed() -> tuple[DictConfig, Origins]:
    return compose_config(["hardware=h100"])


def found(*overrides: str, folder: Path | None = None) -> list[Diagnostic]:
    reading = Reading(*compose_config(list(overrides), str(folder) if folder else None))
    read_hardware(reading)
    return list(reading.findings.items)


@pytest.mark.parametrize("file", sorted(SHIPPED.glob("*.yaml")), ids=lambda file: file.stem)
def test_the_shipped_files_are_read_whole(file: Path) -> None:
    reading = Reading(*compose_config([f"hardware={file.stem}"]))
    assert read_hardware(reading) == yaml.safe_load(file.read_text()) and not reading.findings.items


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("bf16_tflops: -5", "wrong-type", "hardware.bf16_tflops is -5"),
        ("bf16_tflops: .nan", "wrong-type", "hardware.bf16_tflops is nan"),
        ("memory_gb_per_s: fast", "wrong-type", "hardware.memory_gb_per_s is 'fast'"),
        ("network_gb_per_s: 0", "wrong-type", "hardware.network_gb_per_s is 0"),
        ("devices_per_node: 2.5", "wrong-type", "hardware.devices_per_node is 2.5"),
        ("devices_per_node: 0", "wrong-type", "hardware.devices_per_node is 0"),
        ("price_per_hour: [1]", "wrong-type", "hardware.price_per_hour is [1]"),
        ("streams: 1", "wrong-type", "hardware.streams is 1"),
        ("name: 9", "wrong-type", "hardware.name is 9"),
        ("kernells: h100", "unknown-key", "'kernells'"),
        ("kernels: nope", "unknown-value", "no table of kernels 'nope'"),
        ("kernels: nope.json", "unknown-value", "no table of kernels 'nope.json'"),
    ],
)
def test_a_mistake_is_told_at_its_line(line: str, code: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "mine.yaml").write_text(f"memory_gib: 80\n{line}\n")
    [one] = found("hardware=mine", folder=tmp_path)
    assert one.code == code and told in one.message
    assert one.span is not None and one.span.file.endswith("mine.yaml") and one.span.line == 2


def test_a_table_of_another_name_is_proposed() -> None:
    [one] = found("hardware=h100", "hardware.kernels=h1000")
    assert "h100" in str(one.help)
    assert {"a100", "h100", "h200", "b200"} <= set(shipped_tables())


def test_a_value_that_is_null_is_none() -> None:
    reading = Reading(*compose_config(["hardware=h100", "hardware.kernels=null"]))
    assert "kernels" not in read_hardware(reading) and not reading.findings.items


def test_a_list_is_no_hardware(tmp_path: Path) -> None:
    reading = Reading(*compose_config(["hardware=h100"]))
    reading.config.hardware = ["h100"]
    read_hardware(reading)
    assert [one.code for one in reading.findings.items] == ["wrong-type"]


@given(
    st.sampled_from(HARDWARE_KEYS),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
)
def test_what_is_read_can_be_computed_with(key: str, value: object) -> None:
    shared, origins = composed()
    config = copy.copy(shared)
    config.hardware = {"name": "h100", key: value}
    reading = Reading(config, origins)
    read = read_hardware(reading)
    assert bool(reading.findings.items) == (value is not None and key not in read) or key == "kernels"
    if key in POSITIVE and key in read:
        assert 0 < read[key] < math.inf
