"""What works of what the commands and the recipe need: each trial runs in a child process that is given so many seconds,
and nothing of it is left.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from parallelizer.child.in_time import Failed, NotInTime, in_time
from parallelizer.commands.import_torch import import_torch

State = Literal["works", "broken", "absent"]

OLDEST, NEWEST = (2, 11), (2, 13)
"""The releases of torch that this package was tested with; see docs/stable.md."""


@dataclass(frozen=True)
class Trial:
    """What was tried and how it went; `help` says what to do where it did not work. `needed`: nothing goes without it."""

    name: str
    state: State
    text: str
    help: str = ""
    needed: bool = False


def all_trials() -> Iterator[Trial]:
    """Try everything. Takes some twenty seconds where all is well; without torch nothing else is tried."""
    imported = attempt(
        "torch is imported", _imports_torch, 120, "install it again: pip install 'torch>=2.11'", needed=True
    )
    yield imported
    if imported.state != "works":
        return
    import_torch()  # here, so that the children need not
    yield attempt("a plan is read", _reads_a_plan, 30, "install again: pip install --force-reinstall path/to/its/clone",
                  needed=True)  # fmt: skip
    yield attempt("a configuration is composed", _composes, 30, "pip install 'hydra-core>=1.3.2' 'omegaconf>=2.3'",
                  needed=True)  # fmt: skip
    yield attempt("a step is traced on a fake world", _traces, 90, "this torch is not one that was tested: 2.11 to 2.13",
                  needed=True)  # fmt: skip
    yield attempt(
        "two gloo ranks add up", _ranks_add_up, 60,
        "ranks on this machine must reach each other: try GLOO_SOCKET_IFNAME=lo", needed=True,
    )  # fmt: skip
    yield attempt(
        "context-parallel attention, SDPA", _attends, 60, "style context-parallel cannot be used here"
    )
    yield attempt("context-parallel attention, flex", _attends_flexibly, 60,
                  "let the model call scaled_dot_product_attention; flex_attention wants torch 2.12")  # fmt: skip
    if not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")):
        yield Trial(
            "torch.compile", "absent", "no C++ compiler", "apt install g++; only style compile wants it"
        )
    else:
        yield attempt("torch.compile", _compiles, 180, "use no style `compile`, or repair the C++ compiler")
    yield _cuda()


def attempt(
    name: str,
    function: Callable[[], str],
    seconds: float,
    help: str,
    *,
    needed: bool = False,
    sees_gpus: bool = False,
) -> Trial:
    """Try one thing in a child; `function` returns what to say of it when it works."""
    try:
        return Trial(name, "works", in_time(function, seconds, sees_gpus=sees_gpus), needed=needed)
    except (Failed, NotInTime) as error:
        return Trial(name, "broken", " ".join(str(error).split())[:200], help, needed)


def _imports_torch() -> str:
    import_torch()
    import torch

    torch.ones(2).sum()
    known = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if known < OLDEST:
        raise RuntimeError(
            f"torch {torch.__version__} is older than 2.11, the oldest that this package takes"
        )
    if known > NEWEST:
        return f"{torch.__version__}, newer than {'.'.join(map(str, NEWEST))}, the newest that was tested"
    return str(torch.__version__)


def _reads_a_plan() -> str:
    from parallelizer.language.load import load_plan

    return f"llama, {len(load_plan('llama').rules)} rules"


def _composes() -> str:
    from parallelizer.configuration.read_setup import from_overrides

    return f"parallel=fsdp2_tp2: {from_overrides(['parallel=fsdp2_tp2']).mesh}"


def _traces() -> str:
    from parallelizer.configuration.read_setup import from_overrides
    from parallelizer.configuration.validate import validate

    wrong = [d for d in validate(from_overrides(["parallel=cp2_tp2"])) if d.severity != "note"]
    if wrong:
        raise RuntimeError(wrong[0].message)
    return "llama on cp=2 x tp=2 is valid"


def _ranks_add_up() -> str:
    def worker() -> float:
        import torch
        import torch.distributed as dist

        one = torch.ones(1)
        dist.all_reduce(one)
        return float(one)

    if _on_two_ranks(worker) != [2.0, 2.0]:
        raise RuntimeError("the sum of 1 and 1 is not 2")
    return "forked, all-reduce"


def _attends() -> str:
    return _attention(flex=False)


def _attends_flexibly() -> str:
    return _attention(flex=True)


def _attention(*, flex: bool) -> str:
    def worker() -> float:
        import torch
        import torch.distributed as dist
        import torch.nn.functional as F
        from torch import Tensor, nn
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        from parallelizer.styles.context_parallel.public import context_parallel, shard_buffers

        class Attention(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                if not flex:
                    return F.scaled_dot_product_attention(x, x, x, is_causal=True)
                mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 16, 16, device="cpu")
                attended = flex_attention(x, x, x, block_mask=mask)
                return attended if isinstance(attended, Tensor) else attended[0]

        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("there is no world")
        whole = torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        expected = F.scaled_dot_product_attention(whole, whole, whole, is_causal=True)
        module = Attention()
        context_parallel(module, group, method="all-gather")
        rows = {"x": whole, "y": expected}
        local = shard_buffers(rows, {"x": 2, "y": 2}, group)
        found = module(local["x"])
        found.sum().backward()
        return float((found - local["y"]).detach().abs().max())

    worst = max(_on_two_ranks(worker))
    if worst > 1e-5:
        raise RuntimeError(f"the result is {worst:.1g} off")
    return "exact on two ranks, forward and backward"


def _on_two_ranks(worker: Callable[[], float]) -> list[float]:
    import torch

    from parallelizer.runtime.launch import launcher as launch

    torch.set_num_threads(1)
    return launch.start(worker, (), ranks=2, device="cpu", start_timeout=40, collective_timeout=20)


def _compiles() -> str:
    import torch

    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(TORCHINDUCTOR_CACHE_DIR=folder, TORCHINDUCTOR_COMPILE_THREADS="1")
        torch.set_num_threads(1)

        @torch.compile
        def twice(x: Any) -> Any:
            return x.sin() * 2

        if not torch.allclose(twice(torch.ones(8)), torch.ones(8).sin() * 2):
            raise RuntimeError("compiled, it computes something else")
    return "a function for the CPU"


def _cuda() -> Trial:
    name = "CUDA and NCCL"
    try:
        devices = in_time(_cuda_devices, 60, sees_gpus=True)
    except (Failed, NotInTime) as error:
        return Trial(name, "broken", str(error), "do without: device=cpu")
    if not devices:
        return Trial(name, "absent", "no GPU that torch sees", "ranks run on CPUs: device=cpu")
    advice = "see that driver and torch's CUDA fit: nvidia-smi; or device=cpu"
    return attempt(name, _nccl, 120, advice, sees_gpus=True)


def _cuda_devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _nccl() -> str:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    one = torch.ones(1, device="cuda")
    dist.all_reduce(one)
    if float(one) != 1.0:
        raise RuntimeError("an all-reduce of one rank changes its value")
    return f"an all-reduce on cuda:0 of {torch.cuda.device_count()}"
