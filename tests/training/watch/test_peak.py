"""The peak of a GPU by its name, where no hardware is configured."""

from __future__ import annotations

import pytest
import torch

from parallelizer.training.watch.forecast import Forecast
from parallelizer.training.watch.peak import peak_of


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GB200", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_device_is_known_by_its_name(name: str, tflops: float | None) -> None:
    assert peak_of(name) == (None if tflops is None else tflops * 1e12)


def test_the_share_of_the_peak_is_that_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    cuda = torch.device("cuda", 0)
    assert Forecast(flops=989 * 10**12).of_devices(cuda, 4).mfu(0.5) == 0.5
    assert Forecast(flops=989 * 10**12, peak_flops=1e15).of_devices(cuda, 4).mfu(1) == 0.989
    masked = Forecast(flops=1000, peak_flops=1e4, hidden_flops=100)
    assert masked.mfu(0.2) == 0.5 and masked.mfu(0.2, causal=True) == 0.45
    assert Forecast(flops=1).of_devices(torch.device("cpu"), 4).mfu(1) is None
    assert Forecast().of_devices(cuda, 4).mfu(1) is None
