"""What every kernel computes, in plain torch: the same signatures, no concern for speed.

A KV pool is `[blocks, layers, 2 (K, V), kv_heads, block_size, dim]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine import noise


def decode_attention(
    queries: Tensor,
    pool: Tensor,
    layer: int,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """One token a sequence, the last of `lengths` tokens: queries `[seqs, heads, dim]`.

    `tables`: int32 `[seqs, width]`, block ids. `window`: keys at positions above `last - window` count.
    Rows of length 0 give zeros.
    """
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=queries.device)
    return chunk_attention(queries, pool, layer, tables, starts, lengths, scale, window, soft_cap)


def chunk_attention(
    queries: Tensor,
    pool: Tensor,
    layer: int,
    tables: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Runs of tokens, each the last ones of its sequence: queries `[rows, heads, dim]`.

    Rows `query_starts[i]` to `query_starts[i + 1]` are those of sequence i, which has `lengths[i]` tokens in
    all; each attends to itself and all before it.
    """
    out = torch.zeros(queries.shape, dtype=queries.dtype, device=queries.device)
    block_size, kv_heads = pool.shape[4], pool.shape[3]
    group = queries.shape[1] // kv_heads
    for index, length in enumerate(lengths.tolist()):
        first, after = query_starts[index].item(), query_starts[index + 1].item()
        if not length or first == after:
            continue
        blocks = tables[index, : -(-length // block_size)].long()
        # [kv_heads, tokens, dim], in float32.
        keys, values = pool[blocks, layer].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length].float()
        query = queries[first:after].float().view(-1, kv_heads, group, queries.shape[2])
        scores = torch.einsum("thgd,hkd->hgtk", query, keys) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        places = torch.arange(length, device=queries.device)
        last = places[length - int(after - first) :, None]
        hidden = places > last
        if window:
            hidden |= places <= last - window
        shares = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
        out[first:after] = torch.einsum("hgtk,hkd->thgd", shares, values).flatten(1, 2).to(out.dtype)
    return out


def write_kv(pool: Tensor, layer: int, keys_values: Tensor, slots: Tensor) -> None:
    """Stores `[rows, 2 * kv_heads, dim]`, K heads first, at `slots` (block * block_size + offset).

    Slots below 0 are of padding and are not written.
    """
    kv_heads, block_size = pool.shape[3], pool.shape[4]
    rows = (slots >= 0).nonzero().squeeze(1)
    block, offset = slots[rows] // block_size, slots[rows] % block_size
    pool[block, layer, :, :, offset] = keys_values[rows].view(len(rows), 2, kv_heads, -1).to(pool.dtype)


def gather_blocks(memory: Tensor, blocks: Tensor, out: Tensor) -> None:
    """`out[i] = memory[blocks[i]]`; both `[n, block_bytes]`, uint8."""
    out.copy_(memory[blocks.long()])


def scatter_blocks(memory: Tensor, blocks: Tensor, given: Tensor) -> None:
    """`memory[blocks[i]] = given[i]`; no block twice."""
    memory[blocks.long()] = given


def rms_norm(
    x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None, offset: float = 0.0
) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich, 2019), computed in float32.

    With `residual`, `x` is added to it in place, and the sum, rounded to its type, is what is normed.
    `weight + offset` scales: Gemma's weights are kept less 1.
    """
    wide = (x if residual is None else residual.add_(x)).float()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return (wide * (weight.float() + offset)).to(x.dtype)


def rotary(heads: Tensor, cosine: Tensor, sine: Tensor) -> None:
    """Turns `[rows, heads, dim]` in place by `[rows, turned / 2]` cosines and sines (Su et al., 2021).

    The pairs are (i, i + turned / 2); numbers from `turned` on stay as they are.
    """
    half = cosine.shape[1]
    first, second = heads[..., : 2 * half].clone().float().chunk(2, dim=-1)
    cosine, sine = cosine.float().unsqueeze(1), sine.float().unsqueeze(1)
    heads[..., :half] = (first * cosine - second * sine).to(heads.dtype)
    heads[..., half : 2 * half] = (second * cosine + first * sine).to(heads.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[rows, 2 * inner]`, gate first (Shazeer, 2020)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def geglu(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up`, gelu in its tanh form."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def draw_tokens(
    logits: Tensor, heat: Tensor, top_k: Tensor, top_p: Tensor, least: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One token a row of float32 logits `[rows, vocabulary]`: (tokens int64, largest logit, log of the sum
    of exponentials).

    By row: `heat` is the temperature (0: the most likely token), `top_k` (int32) and `top_p` cut (0 and 1 do
    not), `least` is the logarithm of min-p (-inf: none), `keys` int32 `[rows, 2]` of `noise.keys`. The same
    steps in the same order as `engine.sampler.draw`. The largest logit is NaN where a logit is.
    """
    vocabulary = logits.shape[1]
    best, tokens = logits.max(dim=-1)
    sums = torch.logsumexp(logits, dim=-1)
    every = torch.arange(vocabulary, dtype=torch.int32, device=logits.device)
    for row in range(len(logits)):
        if heat[row] <= 0 or not torch.isfinite(best[row]):
            continue
        scaled = (logits[row] - best[row]) / heat[row]
        values = scaled.sort(descending=True).values
        weights = values.exp()
        k = int(top_k[row]) if 0 < int(top_k[row]) < vocabulary else vocabulary
        rank = torch.arange(vocabulary, device=logits.device)
        kept = rank < k
        if float(top_p[row]) < 1.0:
            before = weights.cumsum(0) - weights
            kept &= (before < top_p[row] * (weights * kept).sum()) | (rank == 0)
        cut = values[int(kept.sum()) - 1]
        scaled = scaled.masked_fill((scaled < cut) | (scaled < least[row]), -torch.inf)
        tokens[row] = (noise.gumbel(keys[row : row + 1], every)[0] + scaled).argmax()
    return tokens, best, sums
