"""Children on the fake world: what comes back, what does not, and that nothing stays behind."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallelizer.child.children import Children, WorldError, first_done, in_children
from parallelizer.compiler.observe import phase
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.simulate.fake_world import enter_fake_world
from parallelizer.simulate.record.trace import trace
from tests.simulate.setups import failing, traced


def test_answers_come_in_the_order_of_the_calls() -> None:
    def late(value: int, seconds: float) -> tuple[int, int]:
        time.sleep(seconds)
        return value, os.getpid()

    answers = in_children([(late, 1, 0.2), (late, 2, 0.1), (late, 3, 0.0)])
    assert [value for value, _ in answers] == [1, 2, 3]
    assert len({os.getpid(), *(pid for _, pid in answers)}) == 4


def test_the_first_of_several_that_is_done_is_told() -> None:
    with Children([(time.sleep, 20.0)]) as late, Children([(time.sleep, 0.0)]) as soon:
        assert first_done([late, soon]) is soon
        assert soon.results() == [None]
        with Children([(time.sleep, 0.0), (time.sleep, 20.0)]) as one_of_two:
            assert first_done([late, one_of_two]) is one_of_two


def test_no_calls_no_children() -> None:
    assert in_children([]) == []


def test_an_answer_may_be_larger_than_a_pipe() -> None:
    assert [len(a) for a in in_children([(bytes, 3_000_000), (bytes, 2_000_000)])] == [3_000_000, 2_000_000]


def test_diagnostics_come_back_as_they_were() -> None:
    found = (Diagnostic("trace-failed", "one", severity="warning"), Diagnostic("trace-failed", "two"))

    def refuse() -> None:
        raise PlanError(found)

    with pytest.raises(PlanError) as caught:
        in_children([(refuse,)])
    assert caught.value.diagnostics == found


def divide() -> float:
    return 1 / 0


def exit_quietly() -> None:
    os._exit(0)


def exit_loudly() -> None:
    os._exit(7)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def unpicklable() -> object:
    return lambda: None


def interrupted() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (divide, "ZeroDivisionError: division by zero"),
        (exit_quietly, "ended with status 0, without a result"),
        (exit_loudly, "ended with status 7, without a result"),
        (kill_self, "was killed by SIGKILL (out of memory?), without a result"),
        (unpicklable, "unpicklable"),
        (interrupted, "KeyboardInterrupt"),
    ],
)
def test_anything_else_is_an_error_that_says_how_it_ended(
    function: Callable[[], object], message: str
) -> None:
    with pytest.raises(WorldError) as caught:
        in_children([(lambda: 1,), (function,)])
    assert message in str(caught.value)


def test_what_a_child_prints_goes_to_stderr_and_exit_handlers_do_not_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, os, sys\n"
        "from parallelizer.child.children import in_children\n"
        "atexit.register(lambda: print('left', file=sys.stderr))\n"
        "def child():\n"
        "    print('python')\n"
        "    os.write(1, b'below python\\n')\n"
        "    os.system('echo a process')\n"
        "print('before')\n"
        "in_children([(child,)])\n"
        "print('after')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.stdout == "before\nafter\n"
    assert sorted(done.stderr.splitlines()) == ["a process", "below python", "left", "python"]


def interrupted_and_well() -> str:
    os.kill(os.getpid(), signal.SIGINT)
    return "well"


def test_ctrl_c_which_reaches_children_too_is_the_parent_s_matter() -> None:
    assert in_children([(interrupted_and_well,)]) == ["well"]


def children_of_this_process() -> set[str]:
    tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
    return {pid for task in tasks for pid in (task / "children").read_text().split()}


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")
def test_no_child_and_no_file_outlives_the_call_even_when_it_is_interrupted() -> None:
    processes, files = children_of_this_process(), open_files()
    in_children([(os.getpid,), (os.getpid,)])
    with pytest.raises(WorldError):
        in_children([(divide,), (kill_self,)])

    def ring(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            in_children([(time.sleep, 60), (time.sleep, 60)])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert children_of_this_process() == processes
    assert open_files() == files


def test_a_child_is_any_rank_of_any_world() -> None:
    def where() -> tuple[int, int, str]:
        enter_fake_world(16_384, 12_345)
        total = torch.ones(2)
        dist.all_reduce(total)  # with nobody, at once
        return dist.get_rank(), dist.get_world_size(), dist.get_backend()

    assert in_children([(where,)]) == [(12_345, 16_384, "fake")]


def global_state() -> dict[str, object]:
    """What a trace changes in the process that it runs in."""
    world = dist.distributed_c10d._world
    return {
        "initialized": dist.is_initialized(),
        "groups": dict(world.pg_map),
        "group names": dict(world.pg_names),
        "phase": phase.current(),
        "random": torch.random.get_rng_state().tolist(),
        "state getters": (torch.random.get_rng_state, torch.get_rng_state),
        "modes": torch.utils._python_dispatch._len_torch_dispatch_stack(),
        "threads": torch.get_num_threads(),
        "logging": logging.getLogger("torch._subclasses.fake_tensor").level,
        "gradients": torch.is_grad_enabled(),
        "directory": os.getcwd(),
        "environment": dict(os.environ),
    }


@pytest.mark.parametrize("kind", ["fine", "item", "killed"])
def test_a_trace_leaves_nothing_in_this_process(kind: str) -> None:
    setup = failing(kind, "parallel=fsdp2")
    setup.build_model()  # imports what it needs
    before = global_state()
    with contextlib.nullcontext() if kind == "fine" else pytest.raises(PlanError):
        traced(setup)
    assert global_state() == before


@pytest.mark.parametrize("kind", ["fine", "item"])
def test_a_model_is_left_as_it_was_though_layers_are_folded(kind: str) -> None:
    setup = failing(kind, "parallel=fsdp2", "model.depth=9")
    model = setup.build_model()
    program = setup.compile(model)

    def facts() -> list[object]:
        parameters = [(n, id(p), p.is_meta, tuple(p.shape)) for n, p in model.named_parameters()]
        modules = [
            (n, type(m), len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()
        ]
        return [*parameters, *modules]

    before = facts()
    with contextlib.nullcontext() if kind == "fine" else pytest.raises(PlanError):
        assert trace(program, model, setup.recipe(), rank=1).folded is not None
    assert facts() == before


def test_a_child_computes_alone_whatever_threads_its_parent_has_used(tmp_path: Path) -> None:
    """An OpenMP region in the parent would hang a child that wants the threads of it."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from parallelizer.child.children import in_children\n"
        "from parallelizer.child.in_time import in_time\n"
        "def compute():\n"
        "    x = torch.randn(1000, 1000, requires_grad=True)\n"
        "    (x @ x).softmax(1).sum().backward()\n"
        "    return torch.get_num_threads()\n"
        "torch.set_num_threads(2)\n"
        "assert compute() == 2\n"
        "print(in_children([(compute,)]), in_time(compute, 20), torch.get_num_threads())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.stdout == "[1] 1 2\n", done.stderr
