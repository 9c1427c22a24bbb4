"""Whether a rank waits, told from where its main thread stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelizer.runtime.launch.stacks import Frame, Stack


def stack(tmp_path: Path, line: str, *through: str) -> Stack:
    """A stack whose innermost line of the user's is this, below frames of torch's that pass a call on."""
    file = tmp_path / f"module{abs(hash(line))}.py"
    file.write_text(f"def step():\n    {line}\n")
    passed = [Frame(f"/site-packages/{name}", 1, "call") for name in through]
    return Stack((*passed, Frame(str(file), 2, "step"), Frame("/recipes/train.py", 60, "train")))


@pytest.mark.parametrize(
    "line",
    [
        "work.wait()",
        "finite = bad.tolist()",
        "loss = step.loss.item()",
        "torch.cuda.synchronize()",
        "torch.cuda.current_stream().synchronize()",
        "event.synchronize()",
    ],
)
def test_a_line_that_waits_for_a_collective_or_the_gpu_is_waiting(line: str, tmp_path: Path) -> None:
    assert stack(tmp_path, line).waits
    assert stack(tmp_path, line, "torch/utils/_contextlib.py").waits


@pytest.mark.parametrize("line", ["time.sleep(60)", "items = list(batch.items())", "y = x @ w", "waiting(x)"])
def test_any_other_line_is_at_work(line: str, tmp_path: Path) -> None:
    assert not stack(tmp_path, line).waits


def test_inside_a_collective_of_torch_a_rank_waits(tmp_path: Path) -> None:
    inside = Frame("/site-packages/torch/distributed/distributed_c10d.py", 9, "all_reduce")
    assert Stack((inside, *stack(tmp_path, "dist.all_reduce(x)").frames)).waits
