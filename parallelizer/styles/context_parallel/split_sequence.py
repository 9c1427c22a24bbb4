"""Inputs and outputs of one module split or gathered along the sequence, over the context-parallel axis."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from parallelizer.language.plan import Flow, Placement
from parallelizer.styles.context_parallel.order import Order
from parallelizer.styles.context_parallel.sequence import CurrentOrder, relay
from parallelizer.styles.layouts import Layouts
from parallelizer.styles.statements import Statement, dict_text
from parallelizer.styles.tensor_hooks import convert_inputs, convert_outputs


class SplitSequence(ParallelStyle):
    """Inputs and outputs split or gathered over the axis `cp`, in the order of the model's `sequence`."""

    def __init__(self, layouts: Layouts, sequence: CurrentOrder | None = None) -> None:
        super().__init__()
        self.layouts, self.sequence = layouts, sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group, flows = device_mesh.get_group(), self.layouts
        sequence = self.sequence or CurrentOrder(Order(device_mesh.size()))
        convert_inputs(module, flows.input, lambda x, name: relay(x, flows.input[name], group, sequence))
        convert_outputs(module, flows.output, lambda x, key: relay(x, flows.output[key], group, sequence))
        return module

    def statement(self) -> Statement:
        """The same in exported code, which takes this class from this package."""
        sides = (("input", self.layouts.input), ("output", self.layouts.output))
        layouts = (f"{side}={dict_text(_texts(flows))}" for side, flows in sides if flows)
        return Statement("SplitSequence", (f"Layouts({', '.join(layouts)})", "sequence"), parallel_style=True)


def _texts(flows: Mapping[str, Flow]) -> dict[str, str]:
    return {name: f"Flow({_text(flow.arrives)}, {_text(flow.wanted)})" for name, flow in flows.items()}


def _text(placement: Placement | None) -> str:
    if placement is None:
        return "None"
    return f"shard({placement.dim})" if placement.dim is not None else placement.kind.upper()
