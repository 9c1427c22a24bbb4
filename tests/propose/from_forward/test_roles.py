"""What is found in models whose names say nothing."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallelizer.language.workload import Entry, Workload
from parallelizer.propose.from_forward.facts import Facts, SplitRegion
from parallelizer.propose.from_forward.observe import watch
from parallelizer.propose.from_forward.roles import roles
from parallelizer.propose.from_forward.rules import Choice, units
from parallelizer.propose.from_forward.write_plan import write_plan
from tests.findings import on_meta
from tests.init import models

TOKENS = {"input_ids": Entry(("batch", "sequence"), range=(0, 128))}


def found(build: Callable[[], nn.Module], **entries: Entry) -> Facts:
    model = on_meta(build)
    return roles(model, watch(model, Workload({**TOKENS, **entries}, 4, 64)))


def region(facts: Facts, kind: str) -> SplitRegion:
    return next(r for r in facts.regions if r.kind == kind)


class TwoNames(nn.Module):
    """An MLP whose output it changes, and a head whose bias it holds too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(128, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 128)
        self.bias = self.head.bias

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        y = self.down(F.gelu(self.up(x)))
        y += x
        return self.head(y)


def test_an_output_that_is_changed_in_place_is_copied_and_a_bias_of_two_names_is_split_under_both() -> None:
    facts = found(TwoNames)
    assert region(facts, "mlp").changed == {"down"} and facts.biases == {"head": ("bias",)}
    text = write_plan(facts, Choice(frozenset(units(facts))), "it")
    assert "own: true" in text and re.search(
        r"^  bias: +\{style: shard-params, params: shard\(0\)\}", text, re.MULTILINE
    )


def test_a_fused_projection_is_found_with_its_parts_and_the_module_that_takes_the_stream() -> None:
    facts = found(models.Gpt)
    attention = region(facts, "attention")
    assert dict(attention.sources) == {"trunk.0.look.mix": (1, 1, 1)}
    assert attention.consumers == ("trunk.0.look.back",)
    assert dict(attention.gates) == {"trunk.0.look": ("z",)}
    assert dict(region(facts, "mlp").sources) == {"trunk.0.think.a": ()}
    assert facts.tied
    assert dict(facts.heads) == {"read": True}
    assert facts.blocks == ("trunk.0", "trunk.1")
    assert [(t.module, t.tokens) for t in facts.tables] == [("words", True), ("places", False)]


def test_grouped_heads_their_norms_and_the_numbers_that_count_them_are_found() -> None:
    attention = region(found(models.Qwen), "attention")
    assert list(attention.sources) == ["stack.0.core.ask", "stack.0.core.tell", "stack.0.core.give"]
    assert set(attention.inside) == {"stack.0.core.even_q", "stack.0.core.even_k"}
    assert dict(attention.divide) == {"stack.0.core": ("n", "groups")}


def test_queries_of_one_sequence_and_keys_of_another_go_together() -> None:
    facts = found(models.T5, source=Entry(("batch", "sequence"), range=(0, 128)))
    across = next(r for r in facts.regions if "dec.0.other.wq" in r.sources)
    assert dict(across.gates) == {"dec.0.other": ("x", "memory")}
    assert facts.blocks == ("enc.0", "enc.1", "dec.0", "dec.1")


def test_linears_of_a_block_itself_are_found_without_a_module_around_them() -> None:
    facts = found(models.Flat)
    attention = region(facts, "attention")
    assert dict(attention.sources) == {"hs.0.kv": (1, 1), "hs.0.q": ()}
    assert set(attention.bare) == {"hs.0.kv", "hs.0.q"}


class Around(nn.Module):
    """Something between two linears."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(128, 32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.between = between

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.down(self.between(self.up(self.words(input_ids))))


def turned_and_back(t: Tensor) -> Tensor:
    return t.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize(
    "between",
    [F.relu, lambda t: t * torch.sigmoid(t), lambda t: (t + 1).double().float(), F.dropout, turned_and_back],
    ids=["relu", "silu by hand", "casts", "dropout", "transposes"],
)
def test_what_acts_on_each_feature_alone_may_stand_between(between: Callable[[Tensor], Tensor]) -> None:
    (mlp,) = found(lambda: Around(between)).regions
    assert (list(mlp.sources), mlp.consumers) == (["up"], ("down",))


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda t: F.layer_norm(t, t.shape[-1:]), "the forward sums over it"),
        (lambda t: t.softmax(-1), "an operator needs all of it"),
        (lambda t: t.cumsum(-1), "an operator needs all of it"),
        (lambda t: t + torch.arange(64, device=t.device), "it is combined with a tensor that is not split"),
        (lambda t: t.flip(-1), "an operator needs all of it"),
        (lambda t: t[..., torch.arange(63, -1, -1, device=t.device)], "some of its indices are used"),
        (lambda t: torch.cat((t[..., 32:], t[..., :32]), -1), "it is concatenated with another tensor"),
    ],
    ids=["norm", "softmax", "running sum", "a table", "flip", "gather", "swapped halves"],
)
def test_what_needs_all_features_may_not(between: Callable[[Tensor], Tensor], reason: str) -> None:
    facts = found(lambda: Around(between))
    assert facts.regions == ()
    assert reason in facts.left["up"]


def test_features_in_another_order_are_split_by_what_is_outermost_where_they_are_summed() -> None:
    turned = lambda t: t.view(*t.shape[:-1], 8, 8).transpose(-1, -2).reshape(t.shape)  # noqa: E731
    (mlp,) = found(lambda: Around(turned)).regions
    assert dict(mlp.sources) == {"up": (1,) * 8}


def test_an_operator_that_nobody_knows_needs_the_whole() -> None:
    facts = found(lambda: Around(lambda t: torch.linalg.qr(t)[0]))
    assert facts.regions == ()


class Reads(nn.Module):
    """Attention that reads its width from its input's shape, and splits heads in a way that is given."""

    def __init__(self, heads: str, back: str) -> None:
        super().__init__()
        self.n, self.heads, self.back = 4, heads, back
        self.size = 8
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        if self.heads == "by number":
            q, k, v = (w(x).view(b, t, self.n, c // self.n).transpose(1, 2) for w in (self.q, self.k, self.v))
        else:
            q, k, v = (
                w(x).view(b, t, c // self.size, self.size).transpose(1, 2) for w in (self.q, self.k, self.v)
            )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.o(y.reshape(b, t, c) if self.back == "by width" else y.flatten(2))


class ReadsWidth(nn.Module):
    def __init__(self, heads: str, back: str) -> None:
        super().__init__()
        self.words, self.att = nn.Embedding(128, 32), Reads(heads, back)

    def forward(self, input_ids: Tensor) -> Tensor:
        z = self.words(input_ids)
        return z + self.att(z)


@pytest.mark.parametrize(
    ("heads", "back", "divided"),
    [
        ("by number", "by width", {"n", "x.shape[-1]"}),
        ("by number", "flat", {"n", "x.shape[-1]"}),
        ("by size", "by width", {"x.shape[-1]"}),
        ("by size", "flat", {"x.shape[-1]"}),
    ],
)
def test_sizes_of_an_argument_are_divided_where_they_count_heads(
    heads: str, back: str, divided: set[str]
) -> None:
    attention = region(found(lambda: ReadsWidth(heads, back)), "attention")
    assert set(attention.divide["att"]) == divided


class Einops(nn.Module):
    """Attention whose heads einops takes apart, in a block of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.o = 4, nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        rearrange = pytest.importorskip("einops").rearrange
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in self.qkv(x).chunk(3, -1))
        return self.o(rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)"))


class TwoEinops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.one, self.two = nn.Embedding(128, 32), Einops(), Einops()

    def forward(self, input_ids: Tensor) -> Tensor:
        z = self.words(input_ids)
        z = z + self.one(z)
        return z + self.two(z)


class Layers(nn.Module):
    """Attention that takes its heads apart by layers of einops."""

    def __init__(self) -> None:
        super().__init__()
        Rearrange = pytest.importorskip("einops.layers.torch").Rearrange
        self.words = nn.Embedding(128, 32)
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.apart, self.back = Rearrange("b n (h d) -> b h n d", h=4), Rearrange("b h n d -> b n (h d)")

    def forward(self, input_ids: Tensor) -> Tensor:
        z = self.words(input_ids)
        q, k, v = (self.apart(w(z)) for w in (self.q, self.k, self.v))
        return z + self.o(self.back(F.scaled_dot_product_attention(q, k, v)))


def test_numbers_that_layers_of_einops_hold_are_divided_there() -> None:
    attention = region(found(Layers), "attention")
    assert dict(attention.divide) == {"apart": ("_axes_lengths.h",)}


def test_numbers_that_einops_is_given_are_those_of_each_module() -> None:
    einops = pytest.importorskip("einops")
    einops.rearrange(torch.zeros(2, 13, 32), "b n (h d) -> b h n d", h=4)  # it keeps what it has seen
    one, two = found(TwoEinops).regions
    assert dict(one.divide) == {"one": ("heads",)}
    assert dict(two.divide) == {"two": ("heads",)}


class ByHand(nn.Linear):
    """A linear that multiplies by hand, as Falcon's."""

    def forward(self, input: Tensor) -> Tensor:
        product = input @ self.weight.T
        return product if self.bias is None else product + self.bias


class TwoByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(128, 32), ByHand(32, 64), ByHand(64, 32)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.words(input_ids))))


def test_a_linear_that_multiplies_by_hand_is_a_linear() -> None:
    (mlp,) = found(TwoByHand).regions
    assert (list(mlp.sources), mlp.consumers) == (["up"], ("down",))


class FusedExperts(nn.Module):
    """One of four experts for each token: their matrices are fused in two parameters; `bias` is added to the result."""

    def __init__(self, transposed: bool = False, bias: bool = False) -> None:
        super().__init__()
        up, down = ((4, 32, 48), (4, 24, 32)) if transposed else ((4, 48, 32), (4, 32, 24))
        self.both, self.back = nn.Parameter(torch.zeros(up)), nn.Parameter(torch.zeros(down))
        self.first = nn.Parameter(torch.zeros(4, 48))
        self.last = nn.Parameter(torch.zeros(4, 32)) if bias else None
        self.transposed = transposed

    def apply_to(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.transposed:
            return torch.bmm(x.unsqueeze(1), weight).squeeze(1)
        return torch.bmm(weight, x.unsqueeze(-1)).squeeze(-1)

    def forward(self, rows: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        both = self.apply_to(rows, self.both[chosen]) + self.first[chosen]
        gate, up = (both[:, ::2], both[:, 1::2]) if self.transposed else both.chunk(2, -1)
        out = self.apply_to(F.silu(gate) * up, self.back[chosen])
        if self.last is not None:
            out = out + self.last[chosen]
        return out * shares


class Mixture(nn.Module):
    """Embedded tokens through experts."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.words, self.route = nn.Embedding(128, 32), nn.Linear(32, 4)
        self.norm, self.experts = nn.LayerNorm(32), FusedExperts(**options)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        rows = self.norm(x).flatten(0, 1)
        shares, chosen = self.route(rows).softmax(-1).max(-1, keepdim=True)
        return x + self.experts(rows, chosen.flatten(), shares).view(x.shape)


def test_fused_experts_are_split_along_what_each_makes() -> None:
    (experts,) = found(Mixture).regions
    assert (experts.kind, dict(experts.sources)) == ("experts", {"experts.both": (1, 1)})
    assert dict(experts.grouped) == {"experts.both": 1, "experts.back": 2}
    assert dict(experts.carried) == {"experts.first": (1, (1, 1))}
    assert (dict(experts.terms), experts.sums) == ({"experts": ("rows", "shares")}, ("experts",))


def test_of_interleaved_parts_each_rank_has_neighbours() -> None:
    (experts,) = found(lambda: Mixture(transposed=True)).regions
    assert dict(experts.sources) == {"experts.both": ()}
    assert dict(experts.grouped) == {"experts.both": 2, "experts.back": 1}


def test_what_experts_add_to_a_term_of_a_sum_counts_once() -> None:
    facts = found(lambda: Mixture(bias=True))
    (experts,) = facts.regions
    assert experts.once == ("experts.last",)
    text = write_plan(facts, Choice(frozenset(units(facts))), "it")
    assert re.search(r"^  experts.last: +\{style: replicate, value: partial\}", text, re.MULTILINE)


class Gained(Mixture):
    """Multiplies what its experts give, inside of their module."""

    def __init__(self) -> None:
        super().__init__(bias=True)
        plain = self.experts.forward
        self.experts.forward = lambda *given: plain(*given) * self.experts.gain  # type: ignore[method-assign]
        self.experts.gain = nn.Parameter(torch.ones(32))


def test_experts_that_multiply_a_term_of_a_sum_stay_whole() -> None:
    facts = found(Gained)
    assert facts.regions == ()
    assert facts.left["experts.both"] == "experts.gain is combined with the sum"


class RootMeanSquare(nn.Module):
    """A norm over all features that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * x.square().mean(-1, keepdim=True).rsqrt()


class Between(nn.Module):
    """A norm, and a parameter for each feature, between two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(128, 32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm, self.slope = RootMeanSquare(), nn.Parameter(torch.ones(64))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.down(self.norm(self.up(self.words(input_ids))) * self.slope)


def test_a_norm_over_split_features_and_a_parameter_of_each_do_not_keep_them_whole() -> None:
    (mlp,) = found(Between).regions
    assert (list(mlp.sources), mlp.consumers) == (["up"], ("down",))
    assert (dict(mlp.normed), dict(mlp.carried), mlp.inside) == ({"norm": 2}, {"slope": (0, ())}, ())


class Biased(nn.Module):
    """Attention with a bias of each head from a table, or, without one, from zeros; words are held by a module that is never
    called too.
    """

    def __init__(self, table: bool) -> None:
        super().__init__()
        self.heads = 4
        self.all_words, self.words = nn.Embedding(128, 32), nn.Embedding(128, 32)
        self.all_words.weight = self.words.weight
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.near = nn.Embedding(8, 4) if table else None

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        q, k, v = (p(x).view(*x.shape[:2], -1, 8).transpose(1, 2) for p in (self.q, self.k, self.v))
        n = x.shape[1]
        if self.near is None:
            bias = torch.zeros((1, self.heads, n, n))
        else:
            apart = (torch.arange(n)[:, None] - torch.arange(n)).abs().clamp(max=7)
            bias = self.near(apart).permute(2, 0, 1)[None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return x + self.o(y.transpose(1, 2).flatten(2))


def test_a_bias_of_each_head_is_split_with_the_heads() -> None:
    facts = found(lambda: Biased(True))
    (attention,) = facts.regions
    assert (attention.kind, dict(attention.carried)) == ("attention", {"near.weight": (1, ())})
    assert [(t.module, t.also) for t in facts.tables if t.tokens] == [("words", ("all_words",))]


def test_a_tensor_of_as_many_rows_as_an_attribute_says_is_divided_with_it() -> None:
    (attention,) = found(lambda: Biased(False)).regions
    assert (attention.kind, dict(attention.divide)) == ("attention", {"": ("heads",)})


class SlopedSelf(nn.Module):
    """Attention written out, with a bias for each head that the model hands in."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = 4, nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, z: Tensor, bias: Tensor) -> Tensor:
        b, s = z.shape[:2]
        q, k, v = (t.view(b, s, self.heads, 8).transpose(1, 2) for t in self.qkv(z).chunk(3, dim=-1))
        weights = (q @ k.transpose(-1, -2) + bias[:, :, :s]).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, s, 32))


class Sloped(nn.Module):
    def __init__(self, of: Callable[[], nn.Module] = SlopedSelf) -> None:
        super().__init__()
        self.words, self.look, self.read = nn.Embedding(128, 32), of(), nn.Linear(32, 128)

    def forward(self, input_ids: Tensor) -> Tensor:
        slopes = 2.0 ** -torch.arange(1, 5)
        bias = slopes.view(4, 1, 1) * torch.arange(64).view(1, 1, 64)
        z = self.words(input_ids)
        return self.read(z + self.look(z, bias))


def test_a_bias_for_each_head_is_given_to_a_rank_by_its_heads() -> None:
    facts = found(Sloped)
    attention = region(facts, "attention")
    assert dict(attention.slices) == {"look": {"bias": 0}}
    assert dict(attention.divide) == {"look": ("heads",)}
    text = write_plan(facts, Choice(frozenset(units(facts)), context=False), "")
    assert "input: {z: stream -> replicate, bias: replicate -> shard(0)}, local: true" in text


class Masked(SlopedSelf):
    """The same with torch's attention, to which the bias is a mask for each head."""

    def forward(self, z: Tensor, bias: Tensor) -> Tensor:
        b, s = z.shape[:2]
        q, k, v = (t.view(b, s, self.heads, 8).transpose(1, 2) for t in self.qkv(z).chunk(3, dim=-1))
        bias = bias[:, :, :s].expand(self.heads, s, s)
        return self.out(self.inner(q, k, v, bias[None]).transpose(1, 2).reshape(b, s, 32))

    def inner(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_a_mask_for_each_head_is_given_to_a_rank_by_its_heads() -> None:
    attention = region(found(lambda: Sloped(Masked)), "attention")
    assert dict(attention.slices) == {"look": {"bias": 0}}


class GroupedByIndex(nn.Module):
    """Falcon: queries, keys and values of a group beside each other, taken from each other by index."""

    def __init__(self, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, 8
        self.qkv, self.out = nn.Linear(32, (heads + 2 * groups) * 8), nn.Linear(32, 32)

    def forward(self, z: Tensor, bias: Tensor) -> Tensor:
        b, s = z.shape[:2]
        qkv = self.qkv(z).view(b, s, -1, self.heads // self.groups + 2, self.size)
        q, k, v = qkv[:, :, :, :-2], qkv[:, :, :, [-2]], qkv[:, :, :, [-1]]
        q, k, v = (t.expand(q.shape).flatten(2, 3).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).reshape(b, s, self.heads * self.size))


def test_groups_that_are_taken_apart_by_index_are_split_and_both_their_numbers_divided() -> None:
    attention = region(found(lambda: Sloped(GroupedByIndex)), "attention")
    assert dict(attention.sources) == {"look.qkv": ()} and attention.consumers == ("look.out",)
    assert attention.divide["look"] == ("heads", "groups")


class OneKeyHead(GroupedByIndex):
    """Falcon with multi-query attention: one fused linear, whose last two heads are the key and the value."""

    def __init__(self) -> None:
        super().__init__(4, 1)

    def forward(self, z: Tensor, bias: Tensor) -> Tensor:
        b, s = z.shape[:2]
        qkv = self.qkv(z).view(b, s, self.heads + 2, 8)
        q, k, v = (t.transpose(1, 2) for t in (qkv[..., :-2, :], qkv[..., [-2], :], qkv[..., [-1], :]))
        out = F.scaled_dot_product_attention(q, k.expand(q.shape), v.expand(q.shape), is_causal=True)
        return self.out(out.transpose(1, 2).reshape(b, s, self.heads * self.size))


def test_one_reason_is_given_for_both_ends_of_an_attention_that_stays_whole() -> None:
    facts = found(lambda: Sloped(OneKeyHead))
    assert not facts.regions
    (why,) = {facts.left["look.qkv"], facts.left["look.out"]}
    assert why.startswith("some of its indices are used") and "a linear of their own" in why
    assert "(test_roles.py:" in why or "(tests/propose/" in why


@pytest.mark.parametrize("masked", [False, True])
def test_experts_in_a_list_are_split_inside_and_the_module_around_them_takes_the_whole_stream(
    masked: bool,
) -> None:
    facts = found(lambda: models.Mixture(masked=masked))
    experts = [r for r in facts.regions if r.within]
    assert [list(r.sources) for r in experts] == [
        [f"floors.0.panel.members.{n}.{name}" for name in ("open", "rise")] for n in range(4)
    ]
    assert {r.within for r in experts} == {"floors.0.panel"} and not any(r.gates or r.bare for r in experts)
    text = write_plan(facts, Choice(frozenset(units(facts)), context=False), "")
    assert "floors.*.panel.members.*.{open,rise}: colwise" in text
    assert "floors.*.panel.members.*.fall:        {style: rowwise, output: replicate}" in text
    io = (
        "{style: prepare-io, input: {z: stream -> replicate}, output: replicate -> stream, local_input: true}"
    )
    assert f"floors.*.panel:                       {io}" in text
    assert "judge" not in text


class InBlocks(nn.Module):
    """CodeGen: queries, values and keys beside each other in each of four blocks, which a number in the code counts."""

    def __init__(self, heads: int = 8) -> None:
        super().__init__()
        self.heads, self.size = heads, 32 // heads
        self.mix, self.back = nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, z: Tensor, bias: Tensor) -> Tensor:
        blocks = 4
        b, s = z.shape[:2]
        parts = self.mix(z).reshape(b, s, blocks, -1).split(self.size * self.heads // blocks, dim=-1)
        q, v, k = (
            p.reshape(b, s, 4, self.heads // blocks, self.size).reshape(b, s, -1, self.size) for p in parts
        )
        q, v, k = (t.transpose(1, 2) for t in (q, v, k))
        out = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.back(out.transpose(1, 2).contiguous().view(b, s, self.heads * self.size))


def test_heads_in_blocks_that_a_number_counts_are_split_inside_of_each_block() -> None:
    facts = found(lambda: Sloped(InBlocks))
    attention = region(facts, "attention")
    assert dict(attention.sources) == {"look.mix": (1,) * 12} and dict(attention.taken) == {
        "look.back": (1,) * 4
    }
    assert dict(attention.divide) == {"look": ("heads",)} and not attention.views
    text = write_plan(facts, Choice(frozenset(units(facts)), context=False), "")
    assert "look.back: {style: rowwise, output: stream, packed: [1, 1, 1, 1]}" in text
    # With one head in each block, the blocks themselves would have to be split, and the number is in the way.
    alone = region(found(lambda: Sloped(lambda: InBlocks(4))), "attention")
    assert not alone.taken and alone.views
