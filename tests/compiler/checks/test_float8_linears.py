"""Float8 computes what its rule names, in sizes that kernels have, and with whole scales."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
from torch import Tensor, nn

from parallelizer.language.workload import Workload
from tests.compiler.checks.test_attention_heads import IDS
from tests.findings import findings, marked, mesh_of
from tests.runtime.test_step import llama

pytest.importorskip("torchao", reason="float8 needs torchao")

WIDTH = 32


class Mixture(nn.Module):
    """A router beside its experts, and a linear beside both."""

    def __init__(self, in_list: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 16)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(16)) if in_list else Experts()

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(x)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(nn.Linear(WIDTH, WIDTH).weight.detach().expand(16, -1, -1).clone())


class Stack(nn.Module):
    """Layers, and a head."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(), layer()])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def codes(text: str, layer: Callable[[], nn.Module], **sizes: int) -> list[tuple[str, str]]:
    return [(d.code, d.message) for d in findings(text, lambda: Stack(layer), mesh_of(**sizes))]


def plain() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def test_a_glob_that_catches_the_head_is_refused_at_its_key() -> None:
    text = 'rules: {"**.[01h]*": float8}'
    found = findings(text, lambda: Stack(plain))
    assert [d.code for d in found] == ["precision-caught"]
    assert found[0].message == "`**.[01h]*` puts head in float8 too, which is outside of the repeated layers"
    assert marked(text, found[0]) == '"**.[01h]*"'


class Blocks(nn.Module):
    """Layers in a sequential container, and a head in another one."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(OrderedDict(fc=nn.Linear(WIDTH, WIDTH), act=nn.ReLU())) for _ in range(2)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x))
        return out


def test_a_head_of_several_linears_is_no_list_of_layers() -> None:
    [caught] = findings('rules: {"**.[f2]*": float8}', Blocks)
    assert caught.message == "`**.[f2]*` puts head.2 in float8 too, which is outside of the repeated layers"
    assert findings("rules: {layers.*.fc: float8}", Blocks) == ()
    assert findings("rules: {'head.[02]': float8}", Blocks) == ()


@pytest.mark.parametrize(
    "text",
    [
        'rules: {"{layers.*,head}": float8}',
        "rules: {layers.*: float8, head: float8}",
        "rules: {head: float8}",
    ],
)
def test_a_head_that_is_named_is_meant(text: str) -> None:
    assert codes(text, plain) == []


@pytest.mark.parametrize("in_list", [True, False])
def test_a_router_is_known_by_the_experts_beside_it(in_list: bool) -> None:
    def layer() -> nn.Module:
        return Mixture(in_list)

    assert codes('rules: {"layers.*.[gs]*": float8}', layer) == [
        (
            "precision-caught",
            "`layers.*.[gs]*` puts layers.{0,1}.gate in float8 too, which are a router, which scores experts",
        )
    ]
    assert codes("rules: {layers.*.shared: float8}", layer) == []
    assert codes("rules: {layers.*.gate: float8}", layer) == []


@pytest.mark.parametrize(
    ("size", "style", "tp", "local"),
    [
        (40, "", 1, ""),
        (48, "[colwise, float8]", 2, ", 24x32 of it on a rank"),
        (64, "[colwise, float8]", 8, ", 8x32 of it on a rank"),
    ],
)
def test_sizes_are_those_of_a_rank(size: int, style: str, tp: int, local: str) -> None:
    text = f"rules: {{layers.*: {style or 'float8'}}}"
    assert codes(text, lambda: nn.Linear(WIDTH, size), tp=tp) == [
        (
            "precision-size",
            f"the weight of layers.0 is {size}x{WIDTH}{local}: float8 kernels need multiples of 16 (1 more like it)",
        )
    ]


def test_other_sizes_pass_and_emulation_takes_all() -> None:
    assert codes("rules: {layers.*: [rowwise, float8]}", lambda: nn.Linear(64, 48), tp=4) == []
    assert codes("rules: {layers.*: {style: float8, emulate: true}}", lambda: nn.Linear(WIDTH, 40)) == []


TOKENS = "extends: llama\nrules:\n  layers.*.feed_forward.w[123]: {{style: float8, recipe: {}, emulate: {}}}"


@pytest.mark.parametrize(
    ("recipe", "emulate", "seq_len", "sizes", "tokens"),
    [
        ("rowwise", "false", 12, {"dp_shard": 2}, 12),
        ("tensorwise", "false", 16, {"dp_shard": 2, "cp": 2}, 8),
        ("rowwise", "false", 16, {"dp_shard": 2}, None),
        ("rowwise-gw-hp", "false", 12, {"dp_shard": 2}, None),
        ("rowwise", "true", 12, {"dp_shard": 2}, None),
        ("rowwise", "false, pad: true", 12, {"dp_shard": 2}, None),
    ],
)
def test_the_tokens_of_a_rank_are_a_dimension_too(
    recipe: str, emulate: str, seq_len: int, sizes: dict[str, int], tokens: int | None
) -> None:
    workload = Workload({"input_ids": IDS, "labels": IDS}, 2, seq_len)
    model = llama(dim=64, n_heads=4, n_kv_heads=4, hidden_dim=64, n_layers=1)
    found = findings(TOKENS.format(recipe, emulate), model, mesh_of(**sizes), workload=workload)
    assert [d.message for d in found if d.code == "precision-size"] == (
        [f"a rank computes {tokens} tokens at once: float8 kernels need a multiple of 16"] if tokens else []
    )
