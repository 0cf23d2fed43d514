"""The Llama family: Llama 2 and 3, Mistral, SmolLM2, Qwen2. One forward pass for prompts and decodes alike.

RMSNorm, rotary positions (Su et al., 2021), grouped-query attention (Ainslie et al., 2023), SwiGLU
(Shazeer, 2020), as in Touvron et al., 2023.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from engine.attention.protocol import Attention, Look, Prepared
from engine.linear import Linear
from engine.ops import Ops, TorchOps
from engine.weights import Checkpoint
from fleet.errors import BadRequest

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions; `factor` 1 is the plain kind, else Llama 3 scaling of long wavelengths."""

    theta: float
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def table(self, positions: int, head_dim: int) -> Tensor:
        """Cosines, then sines: `[positions, head_dim]`, float32."""
        frequencies = 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if self.factor != 1.0:
            turns = self.original * frequencies / (2 * math.pi)
            smooth = ((turns - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
            frequencies = (1 - smooth) * frequencies / self.factor + smooth * frequencies
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
        return torch.cat((angles.cos(), angles.sin()), dim=1)


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    vocabulary: int
    hidden: int
    inner: int
    """Width of the feed-forward."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    rope: Rope
    tied: bool
    """The head is the embedding."""
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    max_tokens: int
    """Longest sequence for which full attention is what the model was trained with."""

    @classmethod
    def read(cls, config: dict[str, Any]) -> LlamaConfig:
        """From the contents of config.json; BadRequest names what is missing or not supported."""
        name = (config.get("architectures") or ["(none)"])[0]
        if name not in ARCHITECTURES:
            raise BadRequest(f"architecture {name} is not supported; supported: {', '.join(ARCHITECTURES)}")
        if config.get("hidden_act", "silu") != "silu":
            raise BadRequest(f"hidden_act {config['hidden_act']!r} is not supported; supported: silu")

        def need(key: str) -> int:
            if not isinstance(config.get(key), int):
                raise BadRequest(f"config.json has no number {key}")
            return int(config[key])

        heads, hidden = need("num_attention_heads"), need("hidden_size")
        kv_heads = int(config.get("num_key_value_heads") or heads)
        if heads % kv_heads:
            raise BadRequest(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        qwen = name.startswith("Qwen2")
        attention_bias = bool(config.get("attention_bias", False))
        # Within its window, sliding attention is full attention: so the window is the longest sequence.
        window = config.get("sliding_window") if config.get("use_sliding_window", not qwen) else None
        return cls(
            vocabulary=need("vocab_size"),
            hidden=hidden,
            inner=need("intermediate_size"),
            layers=need("num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=int(config.get("head_dim") or hidden // heads),
            epsilon=float(config.get("rms_norm_eps", 1e-6)),
            rope=_rope(config),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=qwen or attention_bias,
            out_bias=attention_bias and not qwen,
            mlp_bias=bool(config.get("mlp_bias", False)),
            max_tokens=min(need("max_position_embeddings"), int(window or 1 << 30)),
        )


def _rope(config: dict[str, Any]) -> Rope:
    """From either spelling: `rope_parameters`, or `rope_theta` with `rope_scaling`."""
    rope: dict[str, Any] = {"rope_theta": config.get("rope_theta", 10000.0)}
    rope |= config.get("rope_scaling") or {}
    rope |= config.get("rope_parameters") or {}
    kind, theta = rope.get("rope_type", rope.get("type", "default")), float(rope["rope_theta"])
    if float(rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise BadRequest("partial_rotary_factor is not supported")
    if kind == "default":
        return Rope(theta)
    if kind == "llama3":
        return Rope(
            theta,
            factor=float(rope["factor"]),
            low=float(rope["low_freq_factor"]),
            high=float(rope["high_freq_factor"]),
            original=int(rope["original_max_position_embeddings"]),
        )
    raise BadRequest(f"rotary scaling {kind!r} is not supported; supported: default, llama3")


@dataclass(slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: Linear
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """Weights on a device, and the forward pass."""

    def __init__(self, config: LlamaConfig, checkpoint: Checkpoint, ops: Ops | None = None) -> None:
        """`ops`: the device's own; None is plain torch."""
        self.config = config
        self._ops = ops or TorchOps()
        self._look = Look(scale=config.head_dim**-0.5)
        hidden, heads, kv = (
            config.hidden,
            config.heads * config.head_dim,
            config.kv_heads * config.head_dim,
        )
        self._layers: list[_Layer] = []
        self._embedding = checkpoint.take("model.embed_tokens.weight", (config.vocabulary, hidden))
        for index in range(config.layers):
            at = f"model.layers.{index}"
            attention, mlp = f"{at}.self_attn", f"{at}.mlp"
            self._layers.append(
                _Layer(
                    attention_norm=checkpoint.take(f"{at}.input_layernorm.weight", (hidden,)),
                    qkv=checkpoint.linear(
                        [f"{attention}.{part}_proj" for part in "qkv"],
                        (heads, kv, kv),
                        hidden,
                        config.qkv_bias,
                    ),
                    out=checkpoint.linear([f"{attention}.o_proj"], (hidden,), heads, config.out_bias),
                    mlp_norm=checkpoint.take(f"{at}.post_attention_layernorm.weight", (hidden,)),
                    gate_up=checkpoint.linear(
                        [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
                        (config.inner,) * 2,
                        hidden,
                        config.mlp_bias,
                    ),
                    down=checkpoint.linear([f"{mlp}.down_proj"], (hidden,), config.inner, config.mlp_bias),
                )
            )
        self._norm = checkpoint.take("model.norm.weight", (hidden,))
        if config.tied:
            self._head: Linear = checkpoint.tied(self._embedding)
            checkpoint.ignore("lm_head.weight")
        else:
            self._head = checkpoint.linear(["lm_head"], (config.vocabulary,), hidden)
        checkpoint.ignore("rotary_emb.inv_freq")
        checkpoint.finish()
        table = config.rope.table(config.max_tokens, config.head_dim)
        self._rope = table.to(device=self._embedding.device, dtype=self._embedding.dtype)

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: Attention[Prepared], prepared: Prepared
    ) -> Tensor:
        """Last hidden state of every row, `[rows, hidden]`; writes the KV of every token.

        `tokens` and `positions`: int64 `[rows]`, those of the step that `prepared` was made of.
        """
        config, ops = self.config, self._ops
        rotated = config.heads + config.kv_heads
        count = tokens.shape[0]
        cosine, sine = self._rope[positions].chunk(2, dim=-1)
        residual = embedding(tokens, self._embedding)
        added: Tensor | None = None
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(self._normed(residual, added, layer.attention_norm))
            heads = qkv.view(count, rotated + config.kv_heads, config.head_dim)
            ops.rotary(heads[:, :rotated], cosine, sine)
            attention.write(index, heads[:, config.heads :], prepared)
            attended = attention.attend(index, heads[:, : config.heads], prepared, self._look)
            normed = self._normed(residual, layer.out(attended.view(count, -1)), layer.mlp_norm)
            added = layer.down(ops.swiglu(layer.gate_up(normed)))
        return residual if added is None else residual.add_(added)

    def _normed(self, residual: Tensor, added: Tensor | None, weight: Tensor) -> Tensor:
        """Adds what the part before gave to `residual`, in place, and norms the sum."""
        if added is None:
            return self._ops.rms_norm(residual, weight, self.config.epsilon)
        return self._ops.rms_norm(added, weight, self.config.epsilon, residual)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """`[rows, vocabulary]`, float32, of these rows of a last hidden state."""
        found = self._ops.rms_norm(hidden[rows], self._norm, self.config.epsilon)
        return self._head(found, wide=True)
