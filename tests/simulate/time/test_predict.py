"""A step's time on hardware: what it is made of, what was assumed, and what can only make it shorter."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from parallelizer.language.plan import Mesh
from parallelizer.simulate.record.operators import Moment, Operator
from parallelizer.simulate.time.constants import (
    COMPILED_DTENSOR,
    COMPILED_HOST,
    DTENSOR_SECONDS,
    HOST_SECONDS,
    MODULE_SECONDS,
    Constants,
)
from parallelizer.simulate.time.machine import machine_of, without_time
from parallelizer.simulate.time.predict import DEVIATIONS, StepTime, predict, predict_on
from parallelizer.simulate.time.price import Habits
from tests.simulate.setups import llama, traced
from tests.simulate.time.lines import MESH, gathered, machine, memory

HARDWARE = Path(__file__).resolve().parents[3] / "parallelizer" / "configs" / "hardware"
SIZE = (1, 4096, 4096, 4096)
LARGE = (1, 32768, 16384, 16384)
"""A product beside which no overhead counts."""


def hardware(name: str, **changes: Any) -> dict[str, Any]:
    found = OmegaConf.to_container(OmegaConf.load(HARDWARE / f"{name}.yaml"))
    assert isinstance(found, dict)
    return {**{str(k): v for k, v in found.items()}, **changes}


def product(dtype: str = "bfloat16", sizes: tuple[int, ...] = SIZE) -> Operator:
    return Operator("forward", "layers.0", "gemm", "mm", dtype, 3 * 4096 * 4096 * 2, sizes)


def attend(**changes: Any) -> Operator:
    sizes = (1, 32, 8, 8192, 8192, 128)
    return dataclasses.replace(
        Operator("forward", "", "attention", "attend", "bfloat16", 0, sizes, causal=True), **changes
    )


def of(line: list[Moment], **given: Any) -> StepTime:
    found = predict(line, MESH, given or hardware("h100"), 4096)
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200", "gb200", "gb300"])
def test_every_hardware_file_of_a_gpu_has_all_that_a_time_needs(name: str) -> None:
    found = of([product(), attend(), memory(1 << 30)], **hardware(name))
    assert found.assumed == () and found.seconds > 0
    assert found.mfu is not None and 0.1 < found.mfu < 1


def test_nothing_is_predicted_without_hardware_or_without_a_line() -> None:
    assert predict([product()], MESH, hardware("auto"), 1) is None
    assert predict([], MESH, hardware("h100"), 1) is None


def test_the_parts_add_up_to_the_step() -> None:
    setup = llama("parallel=fsdp2_tp2", "device=cuda")
    found = predict(traced(setup).line, setup.mesh, hardware("h100"), 8 * 32)
    assert found is not None
    assert sum(found.compute.values()) + sum(found.waits.values()) == pytest.approx(found.seconds, rel=0.02)
    assert sum(found.modules.values()) == pytest.approx(sum(found.compute.values()))
    assert found.tokens_per_second == pytest.approx(8 * 32 / 4 / found.seconds)


def test_the_range_is_that_of_the_residuals() -> None:
    constants = Constants(spread=0.1)
    found = predict_on(machine(), [product()], MESH, 1, constants=constants)
    assert (
        found.high / found.seconds == found.seconds / found.low == pytest.approx(math.exp(DEVIATIONS * 0.1))
    )


def test_mfu_counts_masked_attention_or_not_and_never_what_is_computed_again() -> None:
    once, again = of([product(), attend()]), of([product(), attend(), attend(again=True), product()])
    assert once.mfu is not None and once.causal_mfu is not None
    products, half = 2 * 4096**3, 2 * 32 * 8192**2 * 128
    assert once.causal_mfu == pytest.approx((products + half) / once.seconds / 989e12)
    assert once.mfu == pytest.approx((products + 2 * half) / once.seconds / 989e12)
    assert again.flops == once.flops + products and again.again == half
    both = of([attend(), attend(backward=True)])
    assert (
        both.flops == 3 * half and both.whole_attention == 3 * half
    )  # 12 L d S a token: two products and four


def test_a_device_without_a_table_has_an_h100_s_efficiency_at_its_own_peak_and_says_so() -> None:
    known = of([product(sizes=LARGE)])
    given = {k: v for k, v in hardware("h100").items() if k != "kernels"}
    unknown = of([product(sizes=LARGE)], **{**given, "name": "X", "bf16_tflops": 989 / 2, "power_w": None})
    assert unknown.seconds == pytest.approx(2 * known.seconds, rel=0.01)
    [note] = unknown.assumed
    assert note.code == "time-assumed" and note.severity == "note" and "X has no table" in note.message


def test_a_missing_table_and_missing_rates_are_named() -> None:
    found = of([product()], **{"name": "X", "bf16_tflops": 100, "kernels": "no-such-gpu"})
    told = " ".join(note.message for note in found.assumed)
    for word in ("no-such-gpu", "no table", "memory_gb_per_s", "node_gb_per_s", "network_gb_per_s"):
        assert word in told


def test_a_dtype_without_a_rate_costs_what_it_moves_and_is_named() -> None:
    found = of([product("complex64")])
    assert found.seconds == pytest.approx(of([memory(3 * 4096 * 4096 * 2)]).seconds)
    assert ["complex64" in note.message for note in found.assumed] == [True]


def test_float32_runs_at_the_ratio_of_the_peaks() -> None:
    ratio = of([product("float32", LARGE)]).seconds / of([product(sizes=LARGE)]).seconds
    assert ratio == pytest.approx(989 / 67, rel=0.01)


def test_eight_bits_are_faster_and_pay_for_their_casts() -> None:
    line = [product()]
    whole, eight = (
        predict_on(_h100(), line, MESH, 1, habits=habits).seconds for habits in (None, Habits("float8"))
    )
    assert 0.45 * whole < eight < 0.9 * whole
    rows = predict_on(_h100(), line, MESH, 1, habits=Habits("float8_rowwise")).seconds
    assert rows > eight


def test_less_power_slows_products_and_not_what_the_memory_bounds() -> None:
    full, less = (hardware("h100", power_w=watts) for watts in (700, 500))
    assert of([product()], **less).seconds > 1.05 * of([product()], **full).seconds
    assert of([memory(1 << 30)], **less).seconds == of([memory(1 << 30)], **full).seconds


def test_attention_s_backward_has_five_products_for_two_at_its_own_rate() -> None:
    forward, backward = of([attend()]).seconds, of([attend(backward=True)]).seconds
    assert backward / forward == pytest.approx(2.5 / Constants().attention_backward, rel=0.01)


@pytest.mark.parametrize("key", ["memory_gb_per_s", "node_gb_per_s", "network_gb_per_s", "power_w"])
@pytest.mark.parametrize("nodes", [1, 64])
def test_more_of_anything_is_never_slower(key: str, nodes: int) -> None:
    mesh, line = Mesh({"dp_shard": 4 * nodes}), gathered(5, 1 << 28, 1 << 30)
    line += [product(), attend()]
    given = hardware("h100")
    slow = predict(line, mesh, given, 1)
    fast = predict(line, mesh, {**given, key: 2 * given[key]}, 1)
    assert slow is not None and fast is not None and fast.seconds <= slow.seconds


def test_the_slowest_of_many_nodes_sets_the_pace() -> None:
    one, many = (predict([product()], Mesh({"dp_shard": n}), hardware("h100"), 1) for n in (8, 64))
    assert one is not None and many is not None
    assert many.seconds == pytest.approx(one.seconds * (1 + 3 * Constants().straggling))


def _h100() -> Any:
    found = machine_of(hardware("h100"))
    assert found is not None
    return found


def notes(line: list[Any], **changes: Any) -> str:
    given = {**hardware("h100"), **changes}
    found = predict(line, MESH, {k: v for k, v in given.items() if v is not None}, 1)
    assert found is not None
    return " ".join(note.message for note in found.assumed)


def test_attention_in_float32_runs_at_the_ratio_of_the_peaks_and_says_so() -> None:
    half, single = attend(), dataclasses.replace(attend(), dtype="float32")
    assert of([single]).seconds / of([half]).seconds == pytest.approx(989 / 67, rel=0.01)
    assert "attention in float32" in notes([single]) and not notes([half])
    unknown = dataclasses.replace(attend(), dtype="float16x2")
    assert "no rate for" in notes([unknown]) and "float16x2" in notes([unknown])


def test_float64_runs_at_half_the_rate_of_float32_and_says_so() -> None:
    double, single = product("float64", LARGE), product("float32", LARGE)
    assert of([double]).seconds / of([single]).seconds == pytest.approx(2, rel=0.05)
    assert "no fp64_tflops" in notes([double])
    assert "fp64" not in notes([double], fp64_tflops=34.0)


@pytest.mark.parametrize(
    ("missing", "line", "told"),
    [
        ("fp32_tflops", [product("float32", LARGE)], "no fp32_tflops"),
        ("fp32_tflops", [product(sizes=LARGE)], ""),
        ("devices_per_node", [product(sizes=LARGE)], "no devices_per_node"),
        ("kernels_power_w", [product(sizes=LARGE)], "no kernels_power_w"),
        ("kernels_node_gb_per_s", [product(sizes=LARGE)], "no kernels_node_gb_per_s"),
    ],
)
def test_a_missing_key_is_noted_where_it_matters(missing: str, line: list[Any], told: str) -> None:
    found = notes(line, **{missing: None})
    assert told in found and bool(told) == bool(found)


def test_named_hardware_without_rates_says_that_it_has_no_time() -> None:
    note = without_time({"name": "X9", "memory_gib": 80.0})
    assert note is not None and "X9" in note.message and note.code == "time-assumed"
    assert without_time(hardware("auto")) is None and without_time(hardware("h100")) is None


def test_flash_attention_2_is_slower_by_what_was_measured() -> None:
    fast, slow = (
        predict_on(_h100(), [attend()], MESH, 1, habits=Habits(flash_2=on)).compute["attention"]
        for on in (False, True)
    )
    assert fast / slow == pytest.approx(0.53, rel=0.01)


def test_dtensors_bind_the_host_and_compiled_ones_by_a_share() -> None:
    eager = dataclasses.replace(memory(1000), dtensors=10, modules=3)
    dispatched = 10 * DTENSOR_SECONDS
    assert of([eager]).waits["host"] == pytest.approx(dispatched + HOST_SECONDS + 3 * MODULE_SECONDS)
    compiled = of([dataclasses.replace(eager, compiled=True)])
    expected = COMPILED_DTENSOR * dispatched + COMPILED_HOST * HOST_SECONDS
    assert compiled.waits["host"] == pytest.approx(expected)


def test_operators_on_dtensors_are_counted_under_tp_alone() -> None:
    sharded, whole = (
        sum(m.dtensors for m in traced(llama(words)).line if isinstance(m, Operator))
        for words in ("parallel=tp2", "parallel=single")
    )
    assert sharded > 100 and whole == 0


def test_groups_of_rows_are_multiplied_in_turn_on_processors_and_at_once_on_a_gpu() -> None:
    """The table's rate grows with the rows: eight groups of 128 take longer than 1,024 rows."""
    groups = dataclasses.replace(product(sizes=(8, 128, 1024, 1024)), name="_grouped_mm", moved=0)
    whole = product(sizes=(1, 1024, 1024, 1024))
    ideal = Constants(sustained=1.0)

    def seconds(operator: Operator, **changes: Any) -> float:
        return predict_on(machine(measured=True, **changes), [operator], MESH, 1, constants=ideal).seconds

    assert seconds(groups) == pytest.approx(seconds(whole))
    assert seconds(groups, streams=False) == pytest.approx(2 * seconds(whole, streams=False))
