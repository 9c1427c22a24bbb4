"""The model against a float64 implementation that shares nothing with it, and what plans rely on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf
from torch import Tensor, nn

from parallelizer.losses import cross_entropy
from parallelizer.models.llama import Attention, Llama, RotaryEmbedding, rotate
from parallelizer.training.data.corpus import unigram_entropy

CONFIGS = Path(__file__).parents[2] / "configs" / "model"
OWN_KEYS = ("plan", "batch", "loss", "tiny")
SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "dim": 48,
    "n_layers": 2,
    "n_heads": 6,
    "n_kv_heads": 2,
    "hidden_dim": 40,
    "max_seq_len": 32,
    "rope_theta": 100.0,
}


def small(**changes: Any) -> Llama:
    """A small model with weights large enough for every part of it to matter in the logits."""
    torch.manual_seed(0)
    model = Llama(**SMALL | changes)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.2 + (1.0 if p.ndim == 1 else 0.0))
    return model


def token_ids(batch: int = 2, seq_len: int = 11) -> Tensor:
    return torch.randint(SMALL["vocab_size"], (batch, seq_len), generator=torch.Generator().manual_seed(1))


def reference(weights: dict[str, Tensor], ids: Tensor, config: dict[str, Any]) -> Tensor:
    """Llama in float64, head by head: complex rotations, an explicit mask and softmax."""
    n_heads, n_kv_heads = config["n_heads"], config["n_kv_heads"]
    size = config["dim"] // n_heads
    B, S = ids.shape

    def norm(x: Tensor, name: str) -> Tensor:
        return x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-5).sqrt() * weights[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return torch.einsum("...i,oi->...o", x, weights[f"{name}.weight"])

    exponents = torch.arange(size // 2, dtype=torch.float64) * 2 / size
    angles = torch.arange(S, dtype=torch.float64)[:, None] / config["rope_theta"] ** exponents
    rotation = torch.polar(torch.ones_like(angles), angles)

    def turned(head: Tensor) -> Tensor:  # [B, S, size]
        pairs = torch.view_as_complex(head.reshape(B, S, size // 2, 2))
        return torch.view_as_real(pairs * rotation).reshape(B, S, size)

    x = weights["tok_embeddings.weight"][ids]
    future = torch.arange(S)[None, :] > torch.arange(S)[:, None]
    for layer in range(config["n_layers"]):
        at = f"layers.{layer}"
        h = norm(x, f"{at}.attention_norm")
        q, k, v = (linear(h, f"{at}.attention.{w}").split(size, -1) for w in ("wq", "wk", "wv"))
        heads = []
        for i in range(n_heads):
            j = i * n_kv_heads // n_heads
            scores = turned(q[i]) @ turned(k[j]).transpose(1, 2) / math.sqrt(size)
            weight = scores.masked_fill(future, -math.inf).exp()
            heads.append(weight / weight.sum(-1, keepdim=True) @ v[j])
        x = x + linear(torch.cat(heads, -1), f"{at}.attention.wo")
        h = norm(x, f"{at}.ffn_norm")
        gate, up = linear(h, f"{at}.feed_forward.w1"), linear(h, f"{at}.feed_forward.w3")
        x = x + linear(gate * gate.sigmoid() * up, f"{at}.feed_forward.w2")
    return linear(norm(x, "norm"), "output")


@pytest.mark.parametrize("n_kv_heads", [1, 2, 6])
def test_logits_and_gradients_equal_the_reference(n_kv_heads: int) -> None:
    model = small(n_kv_heads=n_kv_heads)
    ids = token_ids()
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    expected = reference(weights, ids, SMALL | {"n_kv_heads": n_kv_heads})
    logits = model(ids)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)

    cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * cotangent).sum().backward()
    (expected * cotangent).sum().backward()
    for name, p in model.named_parameters():
        expected_grad = weights[name].grad
        assert p.grad is not None and expected_grad is not None
        error = (p.grad - expected_grad).norm() / expected_grad.norm()
        assert error < 1e-5, f"{name}: {error}"


def test_a_position_sees_nothing_later() -> None:
    model, ids = small(), token_ids(seq_len=12)
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % SMALL["vocab_size"]
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_grouped_heads_equal_the_same_heads_written_out() -> None:
    grouped, plain = small(), small(n_kv_heads=6)
    size = SMALL["dim"] // SMALL["n_heads"]
    state = grouped.state_dict()
    for name, value in state.items():
        if name.endswith(("wk.weight", "wv.weight")):
            state[name] = value.unflatten(0, (2, size)).repeat_interleave(3, dim=0).flatten(0, 1)
    plain.load_state_dict(state)
    torch.testing.assert_close(plain(token_ids()), grouped(token_ids()), rtol=1e-5, atol=1e-5)


def test_slices_of_the_heads_add_up_to_the_whole_attention() -> None:
    torch.manual_seed(0)
    dim, whole = 32, Attention(32, 8, 4)
    x, (cos, sin) = torch.randn(2, 5, dim), RotaryEmbedding(4, 8, 100.0)(5)
    total = torch.zeros_like(x)
    for rank in range(4):
        part = Attention(dim, 8, 4)
        for name, rows in (("wq", 8), ("wk", 4), ("wv", 4)):
            weight = getattr(whole, name).weight[rank * rows : (rank + 1) * rows]
            getattr(part, name).weight = nn.Parameter(weight.detach().clone())
        part.wo.weight = nn.Parameter(whole.wo.weight[:, rank * 8 : (rank + 1) * 8].detach().clone())
        total += part(x, cos, sin)
    torch.testing.assert_close(total, whole(x, cos, sin))


def test_rotated_products_depend_on_distance_alone() -> None:
    cos, sin = RotaryEmbedding(8, 64, 100.0)(64)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(8, generator=generator).expand(1, 64, 1, 8) for _ in range(2))
    products = torch.einsum("si,ti->st", rotate(q, cos, sin)[0, :, 0], rotate(k, cos, sin)[0, :, 0])
    for distance in (0, 3, 17):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_bfloat16_is_rotated_in_float32() -> None:
    cos, sin = RotaryEmbedding(8, 64, 100.0)(64)
    x = torch.randn(1, 64, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(rotate(x, cos, sin), rotate(x.float(), cos, sin).bfloat16())


def test_meta_and_module_by_module_gives_the_directly_built_model() -> None:
    torch.manual_seed(3)
    direct = Llama(**SMALL)
    with torch.device("meta"):
        model = Llama(**SMALL)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for t in (*model.parameters(), *model.buffers()):
            t.fill_(math.nan)  # what nobody initialises shows
    torch.manual_seed(3)
    for module in model.modules():
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            module.reset_parameters()  # type: ignore[operator]
    for (name, expected), value in zip(
        named_tensors(direct), dict(named_tensors(model)).values(), strict=True
    ):
        assert torch.equal(value, expected), name


def test_reset_touches_nothing_but_the_module_s_own() -> None:
    model = small()
    before = {name: t.clone() for name, t in named_tensors(model)}
    for prefix, module in model.named_modules():
        own = [
            name
            for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        ]
        assert hasattr(module, "reset_parameters") == bool(own), prefix
        if not own:
            continue
        module.reset_parameters()
        for name, value in named_tensors(model):
            if name not in {f"{prefix}.{tensor}" for tensor in own}:
                assert torch.equal(value, before[name]), f"{prefix} changed {name}"
        before = {name: t.clone() for name, t in named_tensors(model)}


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def test_buffers_stay_out_of_checkpoints() -> None:
    assert not [name for name in small().state_dict() if name.startswith("rope")]


def test_tied_embeddings_are_one_parameter() -> None:
    model = small(tie_embeddings=True)
    assert model.output.weight is model.tok_embeddings.weight
    assert len(list(model.parameters())) == len(list(small().parameters())) - 1


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="even head size"):
        Llama(**SMALL | {"dim": 42})
    with pytest.raises(ValueError, match="multiple of n_kv_heads 4"):
        Llama(**SMALL | {"n_kv_heads": 4})
    with pytest.raises(ValueError, match="33 tokens; max_seq_len is 32"):
        small()(token_ids(seq_len=33))


def config(name: str, **changes: Any) -> Any:
    """The model's own arguments, as whoever builds it separates them."""
    read = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{name}.yaml"))
    assert isinstance(read, dict)
    return {key: value for key, value in read.items() if key not in OWN_KEYS} | changes


def tiny(name: str) -> dict[str, Any]:
    read: Any = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{name}.yaml"))
    return read["tiny"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama_debug", 1_606_912),
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3_405b", 405_853_388_800),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = instantiate(config(name))
    assert sum(p.numel() for p in model.parameters()) == parameters


OWN = sorted(path.stem for path in CONFIGS.glob("llama*.yaml") if "defaults" not in OmegaConf.load(path))


@pytest.mark.parametrize("name", OWN)
def test_tiny_forms_keep_what_eight_ranks_divide_and_run(name: str) -> None:
    read: Any = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{name}.yaml"))
    assert set(read) >= {"_target_", *OWN_KEYS}
    assert set(read["tiny"]) <= set(read) - {"_target_", *OWN_KEYS}
    arguments = config(name, **tiny(name))
    for key in ("vocab_size", "dim", "hidden_dim", "n_heads", "n_kv_heads"):
        assert arguments[key] % 8 == 0 and read[key] % 8 == 0, key
    for entry in read["batch"].values():
        assert entry["range"] == [0, 256] and arguments["vocab_size"] >= 256
    model = instantiate(arguments)
    assert get_class(arguments["_target_"]) is type(model) is Llama
    assert sum(p.numel() for p in model.parameters()) < 500_000
    assert model(torch.zeros(2, 16, dtype=torch.int64)).shape == (2, 16, arguments["vocab_size"])


def test_packed_documents_give_what_each_gives_alone() -> None:
    """With positions that begin again and a mask, against the model on each document by itself."""
    model = small()
    lengths = [5, 1, 9, 4]
    documents = [token_ids(seq_len=n) for n in lengths]
    numbers = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).expand(
        documents[0].shape[0], -1
    )
    places = torch.cat([torch.arange(n) for n in lengths]).expand_as(numbers)
    earlier = torch.ones(19, 19).tril().bool()
    mask = ((numbers[:, :, None] == numbers[:, None, :]) & earlier).unsqueeze(1)
    packed = model(torch.cat(documents, 1), places, mask)
    alone = torch.cat([model(document) for document in documents], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    for other in (
        model(torch.cat(documents, 1), places),
        model(torch.cat(documents, 1), places.flip(1), mask),
    ):
        assert not torch.allclose(other, alone, rtol=1e-3, atol=1e-3)


def test_it_learns_from_its_own_initialisation() -> None:
    torch.manual_seed(0)
    model = instantiate(config("llama_debug", **tiny("llama_debug")))
    text = torch.tensor(list(b"the quick brown fox jumps over the lazy dog. " * 3))
    batch = {"input_ids": text[None, :-1], "labels": text[None, 1:]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        total, count = cross_entropy(model(batch["input_ids"]), batch)
        loss = total / count
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert abs(losses[0] - math.log(256)) < 0.1  # it starts out knowing nothing, and not worse
    assert losses[-1] < unigram_entropy(text) < 3.2


def test_the_attention_that_plans_intercept_is_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = F.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(([tuple(a.shape) for a in args], kwargs))
        return original(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    small()(token_ids())
    shapes = [(2, 6, 11, 8), (2, 2, 11, 8), (2, 2, 11, 8)]
    assert seen == [(shapes, {"attn_mask": None, "is_causal": True, "enable_gqa": True})] * SMALL["n_layers"]
