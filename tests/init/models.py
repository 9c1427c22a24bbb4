"""Models as people write them, each with its own names and its own way to split heads, for `init` to look at.

No two call the same thing by the same name, so that nothing can be found by names. Letters in shapes: B batch, S sequence,
D width, H heads, E head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, H, VOCAB = 32, 4, 128


class FusedSelf(nn.Module):
    """q, k and v out of one linear, cut apart, heads counted by -1."""

    def __init__(self, bias: bool = True, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.mix, self.back = nn.Linear(D, 3 * D, bias=bias), nn.Linear(D, D, bias=bias)

    def forward(self, z: Tensor) -> Tensor:
        b, s, _ = z.shape
        q, k, v = (t.view(b, s, -1, D // H).transpose(1, 2) for t in self.mix(z).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.back(out.transpose(1, 2).reshape(b, s, -1))


class Wide(nn.Module):
    """A plain MLP."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 4 * D, bias=bias), nn.Linear(4 * D, D, bias=bias)

    def forward(self, z: Tensor) -> Tensor:
        return self.b(F.gelu(self.a(z)))


class GptBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.look, self.think = FusedSelf(), Wide()

    def forward(self, z: Tensor) -> Tensor:
        z = z + self.look(self.n1(z))
        return z + self.think(self.n2(z))


class Gpt(nn.Module):
    """A GPT with fused qkv, learned positions that may be given, and a head that is its embedding."""

    def __init__(self, places: int = 256) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, D), nn.Embedding(places, D)
        self.trunk = nn.ModuleList(GptBlock() for _ in range(2))
        self.last, self.read = nn.LayerNorm(D), nn.Linear(D, VOCAB, bias=False)
        self.read.weight = self.words.weight

    def forward(self, input_ids: Tensor, where: Tensor | None = None) -> Tensor:
        if where is None:
            where = torch.arange(input_ids.shape[1], device=input_ids.device)
        z = self.words(input_ids) + self.places(where)
        for block in self.trunk:
            z = block(z)
        return self.read(self.last(z))


class Scale(nn.Module):
    """An RMS norm over the last dimension, of a size of its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)

    def forward(self, t: Tensor) -> Tensor:
        return t * torch.rsqrt(t.square().mean(-1, keepdim=True) + 1e-6) * self.gain


class Turn(nn.Module):
    """Rotary angles of the first tokens, kept as two buffers."""

    def __init__(self, places: int, size: int) -> None:
        super().__init__()
        self.places, self.size = places, size
        self.register_buffer("c", torch.empty(places, size), persistent=False)
        self.register_buffer("s", torch.empty(places, size), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        steps = torch.arange(self.size // 2, dtype=torch.float32, device=self.c.device) * 2 / self.size
        angle = torch.outer(torch.arange(self.places, dtype=torch.float32, device=self.c.device), 1e4**-steps)
        angle = torch.cat((angle, angle), -1)
        self.c.copy_(angle.cos())
        self.s.copy_(angle.sin())

    def forward(self, t: Tensor) -> Tensor:
        left, right = t.chunk(2, -1)
        return t * self.c[: t.shape[-2]] + torch.cat((-right, left), -1) * self.s[: t.shape[-2]]


class Grouped(nn.Module):
    """Grouped-query attention with a norm over each head and rotary positions; heads are counted by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.groups, self.size = H, H // 2, D // H
        self.ask, self.tell = nn.Linear(D, D, bias=False), nn.Linear(D, D // 2, bias=False)
        self.give, self.out = nn.Linear(D, D // 2, bias=False), nn.Linear(D, D, bias=False)
        self.even_q, self.even_k, self.turn = Scale(D // H), Scale(D // H), Turn(256, D // H)

    def forward(self, z: Tensor) -> Tensor:
        b, s = z.shape[:2]
        q = self.turn(self.even_q(self.ask(z).view(b, s, self.n, self.size)).transpose(1, 2))
        k = self.turn(self.even_k(self.tell(z).view(b, s, self.groups, self.size)).transpose(1, 2))
        v = self.give(z).view(b, s, self.groups, self.size).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).reshape(b, s, self.n * self.size))


class Swish(nn.Module):
    """A gated MLP whose gate and up come out of one linear."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.narrow = nn.Linear(D, 2 * 48, bias=False), nn.Linear(48, D, bias=False)

    def forward(self, z: Tensor) -> Tensor:
        gate, up = self.both(z).chunk(2, -1)
        return self.narrow(F.silu(gate) * up)


class QwenBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between, self.core, self.gate = Scale(D), Scale(D), Grouped(), Swish()

    def forward(self, z: Tensor) -> Tensor:
        z = z + self.core(self.before(z))
        return z + self.gate(self.between(z))


class Qwen(nn.Module):
    """A Llama-like decoder: norms over heads, grouped queries, fused gate and up, no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.stack = nn.Embedding(VOCAB, D), nn.ModuleList(QwenBlock() for _ in range(2))
        self.end, self.o = Scale(D), nn.Linear(D, VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        z = self.e(input_ids)
        for layer in self.stack:
            z = layer(z)
        return self.o(self.end(z))


class ParallelBlock(nn.Module):
    """Attention and MLP side by side on one norm, as in GPT-J."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.left, self.right = nn.LayerNorm(D), FusedSelf(bias=False), Wide(bias=False)

    def forward(self, z: Tensor) -> Tensor:
        h = self.shared(z)
        return z + self.left(h) + self.right(h)


class Parallel(nn.Module):
    """A decoder whose blocks have a parallel residual; without positions, its causal mask is what orders tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.body = nn.Embedding(VOCAB, D), nn.Sequential(*(ParallelBlock() for _ in range(2)))
        self.fin, self.cls = nn.LayerNorm(D), nn.Linear(D, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.cls(self.fin(self.body(self.inp(input_ids))))


class PostBlock(nn.Module):
    """Norms behind the additions, as in the first transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.att, self.na = FusedSelf(causal=False), nn.LayerNorm(D)
        self.ff, self.nf = Wide(), nn.LayerNorm(D)

    def forward(self, z: Tensor) -> Tensor:
        z = self.na(z + self.att(z))
        return self.nf(z + self.ff(z))


class Encoder(nn.Module):
    """A BERT-like encoder with post-norm blocks, two kinds of tokens and a head of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.seg = nn.Embedding(VOCAB, D), nn.Embedding(2, D)
        self.first, self.rest = nn.LayerNorm(D), nn.ModuleList(PostBlock() for _ in range(2))
        self.dense, self.norm, self.out = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, VOCAB)

    def forward(self, input_ids: Tensor, kind: Tensor) -> Tensor:
        z = self.first(self.tok(input_ids) + self.seg(kind))
        for block in self.rest:
            z = block(z)
        return self.out(self.norm(F.gelu(self.dense(z))))


class Inline(nn.Module):
    """A block that has its linears itself, and no module for attention or the MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.kv, self.q, self.o = nn.Linear(D, 2 * D), nn.Linear(D, D), nn.Linear(D, D)
        self.w1, self.w2 = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln1(x)
        k, v = self.kv(h).unflatten(-1, (2, -1, D // H)).unbind(2)
        q = self.q(h).unflatten(-1, (-1, D // H))
        a = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.w2(F.relu(self.w1(self.ln2(x))))


class Flat(nn.Module):
    """A decoder of such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.hs = nn.Embedding(VOCAB, D), nn.ModuleList(Inline() for _ in range(2))
        self.ln, self.un = nn.LayerNorm(D), nn.Linear(D, VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.emb(input_ids)
        for h in self.hs:
            x = h(x)
        return self.un(self.ln(x))


class Cross(nn.Module):
    """Attention from one sequence to another, or to itself."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.wq, self.wk = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.wv, self.wo = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (
            w(t).unflatten(-1, (-1, D // H)).transpose(1, 2)
            for w, t in ((self.wq, x), (self.wk, memory), (self.wv, memory))
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.wo(a.transpose(1, 2).flatten(2))


class T5Block(nn.Module):
    def __init__(self, decodes: bool) -> None:
        super().__init__()
        self.own, self.n1 = Cross(causal=decodes), Scale(D)
        self.other, self.n2 = (Cross(causal=False), Scale(D)) if decodes else (None, None)
        self.ffn, self.n3 = Swish(), Scale(D)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        h = self.n1(x)
        x = x + self.own(h, h)
        if self.other is not None:
            x = x + self.other(self.n2(x), memory)
        return x + self.ffn(self.n3(x))


class T5(nn.Module):
    """An encoder and a decoder that looks at it, with one table of tokens for both."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCAB, D)
        self.enc = nn.ModuleList(T5Block(decodes=False) for _ in range(2))
        self.dec = nn.ModuleList(T5Block(decodes=True) for _ in range(2))
        self.en, self.dn, self.lm = Scale(D), Scale(D), nn.Linear(D, VOCAB, bias=False)

    def forward(self, source: Tensor, input_ids: Tensor) -> Tensor:
        m = self.shared(source)
        for block in self.enc:
            m = block(m)
        m = self.en(m)
        x = self.shared(input_ids)
        for block in self.dec:
            x = block(x, m)
        return self.lm(self.dn(x))


class Vit(nn.Module):
    """Patches of an image, a token for the class, learned positions; the class is read from that token."""

    def __init__(self, side: int = 16, patch: int = 4, classes: int = 32) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, D, patch, patch)
        self.mark = Table(1, D)
        self.grid = Table((side // patch) ** 2 + 1, D)
        self.layers = nn.ModuleList(GptEncoderBlock() for _ in range(2))
        self.after, self.say = nn.LayerNorm(D), nn.Linear(D, classes)

    def forward(self, image: Tensor) -> Tensor:
        z = self.cut(image).flatten(2).transpose(1, 2)
        z = torch.cat((self.mark().expand(z.shape[0], -1, -1), z), 1) + self.grid()
        for layer in self.layers:
            z = layer(z)
        return self.say(self.after(z)[:, 0])


class Table(nn.Module):
    """Learned rows [1, n, D]."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(1, rows, width))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.rows, std=0.02)

    def forward(self) -> Tensor:
        return self.rows


class GptEncoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.look, self.think = FusedSelf(causal=False), Wide()

    def forward(self, z: Tensor) -> Tensor:
        z = z + self.look(self.n1(z))
        return z + self.think(self.n2(z))


class MixerBlock(nn.Module):
    """Tokens are mixed by a linear over the sequence, features by another."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.t1, self.t2 = nn.Linear(tokens, 2 * tokens), nn.Linear(2 * tokens, tokens)
        self.c = Wide()

    def forward(self, z: Tensor) -> Tensor:
        z = z + self.t2(F.gelu(self.t1(self.n1(z).transpose(1, 2)))).transpose(1, 2)
        return z + self.c(self.n2(z))


class Mixer(nn.Module):
    """An MLP mixer on images."""

    def __init__(self, side: int = 16, patch: int = 4, classes: int = 32) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, D, patch, patch)
        self.layers = nn.ModuleList(MixerBlock((side // patch) ** 2) for _ in range(2))
        self.after, self.say = nn.LayerNorm(D), nn.Linear(D, classes)

    def forward(self, image: Tensor) -> Tensor:
        z = self.cut(image).flatten(2).transpose(1, 2)
        for layer in self.layers:
            z = layer(z)
        return self.say(self.after(z).mean(1))


class NanoAttention(nn.Module):
    """As in nanoGPT: the width comes from the input's shape, heads from an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd = H, D
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(D), NanoAttention(), nn.LayerNorm(D), Wide()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGpt(nn.Module):
    """nanoGPT's forward: positions are made inside, so that a part of the sequence does not know where it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, D), nn.Embedding(256, D)
        self.h, self.ln_f = nn.ModuleList(NanoBlock() for _ in range(2)), nn.LayerNorm(D)
        self.lm_head = nn.Linear(D, VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        pos = torch.arange(0, input_ids.size(1), dtype=torch.long, device=input_ids.device)
        x = self.wte(input_ids) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def classify(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The loss of images: (sum over the images, how many there are)."""
    loss = F.cross_entropy(logits.float(), batch["label"], reduction="sum")
    return loss, torch.tensor(float(batch["label"].numel()), device=logits.device)


class Specialist(nn.Module):
    """A gated MLP that gets some tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.rise = nn.Linear(D, 2 * D, bias=False), nn.Linear(D, 2 * D, bias=False)
        self.fall = nn.Linear(2 * D, D, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.fall(F.silu(self.open(rows)) * self.rise(rows))


class Panel(nn.Module):
    """A mixture of experts as a loop over them, each with the rows that chose it; as a mask with `masked`."""

    def __init__(self, masked: bool = False) -> None:
        super().__init__()
        self.masked = masked
        self.judge = nn.Linear(D, 4, bias=False)
        self.members = nn.ModuleList(Specialist() for _ in range(4))

    def forward(self, z: Tensor) -> Tensor:
        b, s, d = z.shape
        flat = z.reshape(-1, d)
        weights, chosen = self.judge(flat).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for number, member in enumerate(self.members):
            if self.masked:
                here = (chosen == number).any(-1)
                out[here] += weights[here, :1] * member(flat[here])
            else:
                rows, place = torch.where(chosen == number)
                out[rows] += weights[rows, place, None] * member(flat[rows])
        return out.view(b, s, d)


class MixtureBlock(nn.Module):
    def __init__(self, masked: bool = False) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.look, self.panel = FusedSelf(), Panel(masked)

    def forward(self, z: Tensor) -> Tensor:
        z = z + self.look(self.n1(z))
        return z + self.panel(self.n2(z))


class Mixture(nn.Module):
    """A decoder with experts in a list."""

    def __init__(self, layers: int = 1, masked: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, D)
        self.floors = nn.ModuleList(MixtureBlock(masked) for _ in range(layers))
        self.last, self.read = nn.LayerNorm(D), nn.Linear(D, VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        z = self.words(input_ids)
        for floor in self.floors:
            z = floor(z)
        return self.read(self.last(z))
