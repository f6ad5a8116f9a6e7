"""Plain PyTorch code of several families, for tests of schemes that are found by tracing. A factory each."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, TOKENS = 32, 4, 16

Made = tuple[nn.Module, list[Tensor]]


class Gpt(nn.Module):
    """A packed projection, cut by chunk, unflattened into heads."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout, self.causal = nn.Dropout(0.1), causal

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.dropout(self.out(seen.transpose(1, 2).flatten(2)))
        found: Tensor = x + self.down(functional.gelu(self.up(self.after(x))))
        return found


class Llama(nn.Module):
    """Grouped queries, rotary positions by hand, gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * 8, bias=False) for n in (HEADS, 2, 2))
        self.o, self.gate = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 64, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 64, bias=False), nn.Linear(64, WIDTH, bias=False)

    def _turned(self, x: Tensor) -> Tensor:
        angles = torch.arange(TOKENS)[:, None] / 10.0 ** torch.arange(4)[None, :]
        first, second = x.chunk(2, -1)
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1
        )

    def forward(self, x: Tensor) -> Tensor:
        read = self.norm(x)
        q, k, v = (of(read).view(x.shape[0], TOKENS, -1, 8).transpose(1, 2) for of in (self.q, self.k, self.v))
        seen = functional.scaled_dot_product_attention(
            self._turned(q), self._turned(k), v, is_causal=True, enable_gqa=True
        )
        x = x + self.o(seen.transpose(1, 2).reshape(x.shape))
        read = self.norm2(x)
        found: Tensor = x + self.down(functional.silu(self.gate(read)) * self.up(read))
        return found


class Grouped(nn.Module):
    """One projection for queries and fewer keys and values, and one for a gate and what it lets through."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, (HEADS + 4) * 8)
        self.o, self.into = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 128, bias=False)
        self.down = nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).split([32, 16, 16], -1)
        )
        k, v = (part.repeat_interleave(2, 1) for part in (k, v))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        inner = self.into(x)
        found: Tensor = x + self.down(functional.silu(inner[..., :64]) * inner[..., 64:])
        return found


class Mamba(nn.Module):
    """Mamba-2's mixer: one projection for gate, channels, states and time steps; what is put and read in two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 32 + 64 + HEADS, bias=False), nn.Linear(32, WIDTH, bias=False)
        self.near = nn.Conv1d(64, 64, 4, padding=3, groups=64)
        self.decay, self.skip = nn.Parameter(torch.zeros(HEADS)), nn.Parameter(torch.ones(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        gate, inner, step = self.into(x).split([32, 64, HEADS], -1)
        inner = functional.silu(self.near(inner.transpose(1, 2))[..., :TOKENS].transpose(1, 2))
        channels, put, read = inner.split([32, 16, 16], -1)
        step, channels = functional.softplus(step), channels.view(*x.shape[:2], HEADS, 8)
        put, read = (part.view(*x.shape[:2], 2, 8).repeat_interleave(2, 2) for part in (put, read))
        sums = torch.cumsum(-step * self.decay.exp(), 1)
        share = torch.exp(sums[:, :, None] - sums[:, None, :]) * torch.ones(TOKENS, TOKENS).tril()[..., None]
        scores = torch.einsum("bshn,bzhn->bszh", read, put) * share
        state = torch.einsum("bszh,bzhp->bshp", scores, channels * step[..., None]) + channels * self.skip[:, None]
        found: Tensor = x + self.out(state.flatten(2) * functional.silu(gate))
        return found


class Experts(nn.Module):
    """A softmax over experts, each token's word of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.into, self.out = nn.Parameter(torch.randn(4, WIDTH, 64)), nn.Parameter(torch.randn(4, 64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        inner = functional.gelu(torch.einsum("bsh,ehf->bsef", x, self.into))
        return x + torch.einsum("bsef,efh,bse->bsh", inner, self.out, shares)


class Mixture(nn.Module):
    """Each token's word of its two experts, gated; the others' shares are nought."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4, bias=False)
        self.gate, self.up = (nn.Parameter(torch.randn(4, WIDTH, 64) / 8.0) for _ in range(2))
        self.down = nn.Parameter(torch.randn(4, 64, WIDTH) / 8.0)

    def forward(self, x: Tensor) -> Tensor:
        read = self.norm(x)
        scores = self.router(read).softmax(-1)
        shares = scores * (scores >= scores.topk(2, -1)[0][..., 1:])
        inner = functional.silu(torch.einsum("bsh,ehf->bsef", read, self.gate))
        inner = inner * torch.einsum("bsh,ehf->bsef", read, self.up)
        return x + torch.einsum("bsef,efh,bse->bsh", inner, self.down, shares)


class StateSpace(nn.Module):
    """A convolution of neighbours, and a scan as a running sum."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.near = nn.Conv1d(64, 64, 4, padding=3, groups=64)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.into(x)
        near = self.near(inner.transpose(1, 2))[..., :TOKENS].transpose(1, 2)
        found: Tensor = x + self.out(torch.cumsum(functional.silu(near), 1) * torch.sigmoid(inner))
        return found


class Vit(nn.Module):
    """Patches by a convolution, positions, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.positions, self.layer = nn.Parameter(torch.randn(TOKENS, WIDTH)), Gpt(causal=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(self.patches(x).flatten(2).transpose(1, 2) + self.positions)
        return found


class Unet(nn.Module):
    """Down, up again, and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.low, self.up = nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.Conv2d(32, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = functional.silu(self.norm(self.down(x)))
        low = functional.interpolate(functional.relu(self.low(first)), scale_factor=2.0)
        found: Tensor = x + self.up(torch.cat([first, low], 1))
        return found


class Cross(nn.Module):
    """Attention to other tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        k, v = self.kv(other).view(*other.shape[:2], 2, HEADS, -1).unbind(2)
        q = self.q(x).unflatten(-1, (HEADS, -1))
        seen = functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)))
        found: Tensor = x + self.o(seen.transpose(1, 2).flatten(2))
        return found


class Language(nn.Module):
    """Words, two equal layers, logits and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(40, WIDTH), nn.ModuleList([Gpt(), Gpt()])
        self.head = nn.Linear(WIDTH, 40)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


class Core(nn.Module):
    """Attention as a module of its own."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Separate(nn.Module):
    """A module for each projection, some with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=bias) for bias in (False, True, True))
        self.core, self.out = Core(), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        read = self.before(x)
        q, k, v = (of(read).view(x.shape[0], TOKENS, -1, 8).transpose(1, 2) for of in (self.q, self.k, self.v))
        x = x + self.out(self.core(q, k, v).transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(functional.gelu(self.up(self.after(x))))
        return found


class Latent(nn.Module):
    """Latent attention: narrow projections, one rotated key for all heads, written into slices."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Linear(WIDTH, 24, bias=False), nn.RMSNorm(16)
        self.q, self.kv = nn.Linear(WIDTH, HEADS * 24, bias=False), nn.Linear(16, HEADS * 24, bias=False)
        self.out = nn.Linear(HEADS * 8, WIDTH, bias=False)

    def _turned(self, x: Tensor) -> Tensor:
        angles = torch.arange(TOKENS)[:, None] / 10.0 ** torch.arange(8)[None, :]
        half = torch.cat((-x[..., 4:], x[..., :4]), -1)
        return x * angles.cos() + half * angles.sin()

    def forward(self, x: Tensor) -> Tensor:
        narrow, turned = self.down(x).split([16, 8], -1)
        q = self.q(x).view(x.shape[0], TOKENS, HEADS, 24).transpose(1, 2)
        k, v = self.kv(self.norm(narrow)).view(x.shape[0], TOKENS, HEADS, 24).transpose(1, 2).split([16, 8], -1)
        keys = q.new_empty(q.shape)
        keys[..., :16] = k
        keys[..., 16:] = self._turned(turned.unsqueeze(1)).expand(-1, HEADS, -1, -1)
        q = torch.cat([q[..., :16], self._turned(q[..., 16:])], -1)
        scores = (q @ keys.transpose(2, 3)) / 24**0.5 + torch.full((TOKENS, TOKENS), float("-inf")).triu(1)
        found: Tensor = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(*x.shape[:2], -1))
        return found


class Window(nn.Module):
    """Each token sees its last four; keys for two heads each; a norm written out."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.o = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(WIDTH, WIDTH, bias=False)
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * 8, bias=False) for n in (HEADS, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        read = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + self.scale)
        q, k, v = (of(read).view(*x.shape[:2], -1, 8).transpose(1, 2) for of in (self.q, self.k, self.v))
        ones = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
        k, v = (of.repeat_interleave(2, 1) for of in (k, v))
        mask = ones.tril() & ~ones.tril(-4)
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        found: Tensor = x + self.o(seen.transpose(1, 2).flatten(2))
        return found


class Scan(nn.Module):
    """A selective scan, by doubling: each token's state is its own and a share of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.step, self.out = nn.Linear(WIDTH, 128), nn.Linear(64, 64), nn.Linear(64, WIDTH)
        self.states, self.decay = nn.Linear(64, 8, bias=False), nn.Parameter(torch.zeros(64, 4))

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = self.into(x).chunk(2, -1)
        step = functional.softplus(self.step(inner)).unsqueeze(-1)
        put, read = self.states(inner).chunk(2, -1)
        share, state = torch.exp(-step * self.decay.exp()), step * put.unsqueeze(2) * inner.unsqueeze(-1)
        for before in (1, 2, 4, 8):
            pad = (0, 0, 0, 0, before, 0)
            state = state + share * functional.pad(state, pad)[:, :TOKENS]
            share = share * functional.pad(share, pad, value=1.0)[:, :TOKENS]
        found: Tensor = x + self.out(torch.einsum("bsdn,bsn->bsd", state, read) * functional.silu(gate))
        return found


class Routed(Mixture):
    """Tokens of all samples in one row, shares by scatter."""

    def forward(self, x: Tensor) -> Tensor:
        read = self.norm(x).view(-1, WIDTH)
        scores = self.router(read).softmax(-1)
        best, which = scores.topk(2, -1)
        shares = torch.zeros_like(scores).scatter(-1, which, best / best.sum(-1, keepdim=True))
        inner = functional.silu(torch.einsum("th,ehf->tef", read, self.gate))
        inner = inner * torch.einsum("th,ehf->tef", read, self.up)
        return x + torch.einsum("tef,efh,te->th", inner, self.down, shares).view(x.shape)


class Twice(nn.Module):
    """One matrix, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.again(self.again(x))
        return found


class Branching(Twice):
    """Its graph changes with its input."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.again(x) if x.sum() > 0.0 else x
        return found


class Choosing(Twice):
    """How much it makes depends on its input."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.again(x[x.sum(-1) > 0.0])
        return found


class Unruled(Twice):
    """An operator without a rule."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.linalg.matrix_exp(self.again(x).bmm(x.transpose(1, 2)))
        return found


def _tokens(microbatch: int) -> Tensor:
    return torch.randn(microbatch, TOKENS, WIDTH)


def gpt(microbatch: int) -> Made:
    return Gpt(), [_tokens(microbatch)]


def llama(microbatch: int) -> Made:
    return Llama(), [_tokens(microbatch)]


def grouped(microbatch: int) -> Made:
    return Grouped(), [_tokens(microbatch)]


def mamba(microbatch: int) -> Made:
    return Mamba(), [_tokens(microbatch)]


def experts(microbatch: int) -> Made:
    return Experts(), [_tokens(microbatch)]


def mixture(microbatch: int) -> Made:
    return Mixture(), [_tokens(microbatch)]


def state_space(microbatch: int) -> Made:
    return StateSpace(), [_tokens(microbatch)]


def encoder(microbatch: int) -> Made:
    """torch's own, whose packed projection is wider than heads are."""
    layer = nn.TransformerEncoderLayer(320, HEADS, 64, batch_first=True)
    return layer, [torch.randn(microbatch, TOKENS, 320)]


def vit(microbatch: int) -> Made:
    return Vit(), [torch.randn(microbatch, 3, 16, 16)]


def unet(microbatch: int) -> Made:
    return Unet(), [torch.randn(microbatch, 8, 8, 8)]


def cross(microbatch: int) -> Made:
    return Cross(), [_tokens(microbatch), torch.randn(microbatch, 24, WIDTH)]


def language(microbatch: int) -> Made:
    return Language(), [torch.randint(40, (microbatch, TOKENS))]


def separate(microbatch: int) -> Made:
    return Separate(), [_tokens(microbatch)]


def latent(microbatch: int) -> Made:
    return Latent(), [_tokens(microbatch)]


def window(microbatch: int) -> Made:
    return Window(), [_tokens(microbatch)]


def scan(microbatch: int) -> Made:
    return Scan(), [_tokens(microbatch)]


def routed(microbatch: int) -> Made:
    return Routed(), [_tokens(microbatch)]


def choosing(microbatch: int) -> Made:
    return Choosing(), [_tokens(microbatch)]


def twice(microbatch: int) -> Made:
    return Twice(), [_tokens(microbatch)]


def branching(microbatch: int) -> Made:
    return Branching(), [_tokens(microbatch)]


def unruled(microbatch: int) -> Made:
    return Unruled(), [_tokens(microbatch)]
