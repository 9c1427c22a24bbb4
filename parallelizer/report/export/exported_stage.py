"""One stage of a pipeline as an exported file has it, for torch's `PipelineStage`. Nothing here runs but there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

Values = dict[tuple[str, int], torch.Tensor]


class StageEnded(BaseException):
    """Leaves the model's forward behind the last module of a stage."""


class Elsewhere(nn.Module):
    """Stands in for a module of another stage, with its attributes. It returns what was received of that module, and
    otherwise zeros that take no memory, since nothing of this stage depends on them. `count` is the length of the tuple that
    the module returns, None for a tensor.
    """

    def __init__(self, path: str, module: nn.Module, count: int | None, values: Values) -> None:
        super().__init__()
        own = {n: v for n, v in vars(module).items() if not n.startswith("_") and n != "forward"}
        self.__dict__.update(own)
        self.path, self.count, self.values = path, count, values

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        every = tuple(self._output(index) for index in range(self.count or 1))
        return every[0] if self.count is None else every

    def _output(self, index: int) -> torch.Tensor:
        if (self.path, index) in self.values:
            return self.values[self.path, index]
        like = next(iter(self.values.values()))
        return like.new_zeros(()).expand(like.shape)


class PlainStage(nn.Module):
    """One stage of a model: the model's own forward with stand-ins for the modules of other stages, left behind `last`.

    `divided` are the modules whose code runs on every stage; of their modules `runs` are the stage's, and of their parameters
    `parameters`. `receives` and `sends` are tensors that come from the stage before and go to the next: the module that
    returned each, and its place in the tuple, 0 for a tensor. `tuples` are the lengths of tuples, by module.
    """

    def __init__(
        self,
        model: nn.Module,
        divided: Sequence[str],
        tuples: Mapping[str, int],
        runs: Collection[str],
        parameters: Collection[str],
        receives: Sequence[tuple[str, int]],
        sends: Sequence[tuple[str, int]],
        last: str | None,
    ) -> None:
        super().__init__()
        self.model, self.receives, self.sends, self.last = model, receives, sends, last
        self.values: Values = {}
        for path in divided:
            around = model.get_submodule(path)
            before = f"{path}." if path else ""
            for name, child in list(around.named_children()):
                inner = before + name
                if inner not in divided and inner not in runs:
                    setattr(around, name, Elsewhere(inner, child, tuples.get(inner), self.values))
            for name, _ in list(around.named_parameters(recurse=False)):
                if before + name not in parameters:
                    around.register_parameter(name, None)

    def watch(self) -> None:
        """From now on keep what is sent, as it is behind all hooks that there are, and leave the forward behind `last`."""
        sent = {path for path, _ in {*self.sends} - {*self.receives}}
        for path in sent | ({self.last} if self.last is not None else set()):
            self.model.get_submodule(path).register_forward_hook(self._returns(path))

    def _returns(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            self.values.update({(path, index): value for index, value in enumerate(outputs)})
            if path == self.last:
                raise StageEnded

        return hook

    def forward(self, *received: torch.Tensor, **batch: torch.Tensor) -> Any:
        """What the stage sends; of the last stage the model's output, or its `logits`."""
        self.values.update(zip(self.receives, received, strict=True))
        try:
            output = self.model(**batch)
            return getattr(output, "logits", output)
        except StageEnded:
            sent = tuple(self.values[value].contiguous() for value in self.sends)
            return sent if len(sent) > 1 else sent[0]
        finally:
            self.values.clear()


class SharedGradients:
    """Sums the gradients of parameters of which several stages hold a copy; call it behind each step, before the norm, which
    counts each copy. `shared` are the names of each parameter with the stages that hold it, `placed` the stages of each rank
    of pp. Every rank makes one: each parameter has a process group.
    """

    def __init__(
        self,
        stages: Sequence[PlainStage],
        mesh: DeviceMesh,
        shared: Sequence[tuple[Sequence[str], Collection[int]]],
        placed: Sequence[Sequence[int]],
    ) -> None:
        ranks, here = dist.get_process_group_ranks(mesh.get_group("pp")), mesh.get_local_rank("pp")
        self.summed: list[tuple[list[nn.Parameter], dist.ProcessGroup | None]] = []
        for names, holders in shared:
            among = [rank for rank, numbers in enumerate(placed) if {*numbers} & {*holders}]
            if here not in among:
                continue
            every = [ranks[rank] for rank in among]
            group = dist.new_group(every, use_local_synchronization=True) if len(every) > 1 else None
            own = [p for stage in stages for n, p in stage.model.named_parameters() if n in names]
            self.summed.append((own, group))

    def __call__(self) -> None:
        for copies, group in self.summed:
            gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in copies]
            total = torch.stack([g for g in gradients if g is not None]).sum(0)
            if group is not None:
                dist.all_reduce(total, group=group)
            for gradient in gradients:
                if gradient is not None:
                    gradient.copy_(total)
