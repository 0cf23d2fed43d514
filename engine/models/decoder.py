"""The decoder: one forward pass for all architectures, and for prompts and decodes alike.

RMSNorm, rotary positions, grouped-query attention (Ainslie et al., 2023), gated feed-forwards (Shazeer,
2020), as in Touvron et al., 2023; what else an architecture has is in the words of its configuration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from engine.attention.protocol import Attention, Look, Prepared
from engine.linear import Linear
from engine.models.architecture import DecoderConfig
from engine.models.experts import Dense, Mixture
from engine.ops import Ops, TorchOps
from engine.weights import Checkpoint


@dataclass(slots=True)
class _Layer:
    look: Look
    rope: int | None
    attention_norm: Tensor
    qkv: Linear
    head_norms: tuple[Tensor, Tensor] | None
    """Of queries and keys."""
    out: Linear
    after_attention: Tensor | None
    mlp_norm: Tensor
    feed_forward: Dense | Mixture
    after_mlp: Tensor | None


class Decoder:
    """Weights on a device, and the forward pass."""

    def __init__(self, config: DecoderConfig, checkpoint: Checkpoint, ops: Ops | None = None) -> None:
        """`ops`: the device's own; None is plain torch."""
        self.config = config
        self._ops = ops or TorchOps()
        self._activate = self._ops.swiglu if config.activation == "swiglu" else self._ops.geglu
        at, head = _places(config, checkpoint)
        self._embedding = checkpoint.take(f"{at}.embed_tokens.weight", (config.vocabulary, config.hidden))
        self._embedding_scale = 1.0
        if config.scaled_embedding:
            # Rounded to the model's type, as it was in training.
            self._embedding_scale = float(torch.tensor(math.sqrt(config.hidden), dtype=checkpoint.dtype))
        order = _head_order(config)
        self._layers = checkpoint.each(
            len(config.layers), lambda index: self._layer(checkpoint, f"{at}.layers.{index}", index, order)
        )
        self._norm = checkpoint.take(f"{at}.norm.weight", (config.hidden,))
        if config.tied:
            self._head: Linear = checkpoint.tied(self._embedding)
            checkpoint.ignore("lm_head.weight")
        else:
            self._head = checkpoint.linear([head], (config.vocabulary,), config.hidden)
        checkpoint.ignore("rotary_emb.inv_freq")
        if config.nested:
            checkpoint.ignore("vision_tower.", "multi_modal_projector.")
        checkpoint.finish()
        self._ropes = [
            rope.table(config.max_tokens).to(device=checkpoint.device, dtype=checkpoint.dtype)
            for rope in config.ropes
        ]

    @property
    def capturable(self) -> bool:
        """Whether a step can be a CUDA graph: nothing in it waits for the host."""
        return not any(
            isinstance(layer.feed_forward, Mixture) and not layer.feed_forward.capturable
            for layer in self._layers
        )

    def _layer(self, checkpoint: Checkpoint, at: str, index: int, order: Tensor | None) -> _Layer:
        config = self.config
        hidden, dim = config.hidden, config.head_dim
        heads, kv = config.heads * dim, config.kv_heads * dim
        attention, kind = f"{at}.self_attn", config.layers[index]

        def norm(name: str, width: int = hidden) -> Tensor:
            return checkpoint.take(f"{at}.{name}.weight", (width,))

        if config.fused:
            names, outs = [f"{attention}.qkv_proj"], [heads + 2 * kv]
        else:
            names, outs = [f"{attention}.{part}_proj" for part in "qkv"], [heads, kv, kv]
        # The norm before the feed-forward is called after what it follows, where nothing else has that name.
        before_mlp = "pre_feedforward_layernorm" if config.norms_after else "post_attention_layernorm"
        return _Layer(
            look=Look(config.scale, kind.window, config.score_cap),
            rope=kind.rope,
            attention_norm=norm("input_layernorm"),
            qkv=checkpoint.linear(names, outs, hidden, config.qkv_bias, order),
            head_norms=(norm("self_attn.q_norm", dim), norm("self_attn.k_norm", dim))
            if config.head_norms
            else None,
            out=checkpoint.linear([f"{attention}.o_proj"], [hidden], heads, config.out_bias),
            after_attention=norm("post_attention_layernorm") if config.norms_after else None,
            mlp_norm=norm(before_mlp),
            feed_forward=self._feed_forward(checkpoint, at, kind.sparse),
            after_mlp=norm("post_feedforward_layernorm") if config.norms_after else None,
        )

    def _feed_forward(self, checkpoint: Checkpoint, at: str, sparse: bool) -> Dense | Mixture:
        config, mlp, activate = self.config, f"{at}.mlp", self._activate
        hidden, inner, bias = config.hidden, config.dense_inner, config.mlp_bias
        if sparse and config.experts is not None:
            return Mixture(config.experts, checkpoint, at, hidden, activate)
        if config.fused:
            gate_up = checkpoint.linear([f"{mlp}.gate_up_proj"], [2 * inner], hidden, bias)
        else:
            gate_up = checkpoint.linear([f"{mlp}.gate_proj", f"{mlp}.up_proj"], [inner, inner], hidden, bias)
        return Dense(gate_up, checkpoint.linear([f"{mlp}.down_proj"], [hidden], inner, bias), activate)

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: Attention[Prepared], prepared: Prepared
    ) -> Tensor:
        """Last hidden state of every row, `[rows, hidden]`; writes the KV of every token.

        `tokens` and `positions`: int64 `[rows]`, those of the step that `prepared` was made of.
        """
        config, ops = self.config, self._ops
        rotated = config.heads + config.kv_heads
        count = tokens.shape[0]
        angles = [table[positions].chunk(2, dim=-1) for table in self._ropes]
        residual = embedding(tokens, self._embedding)
        if self._embedding_scale != 1.0:
            residual.mul_(self._embedding_scale)
        added: Tensor | None = None
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(self._normed(residual, added, layer.attention_norm))
            heads = qkv.view(count, rotated + config.kv_heads, config.head_dim)
            if layer.head_norms is not None:
                self._norm_heads(heads[:, : config.heads], layer.head_norms[0])
                self._norm_heads(heads[:, config.heads : rotated], layer.head_norms[1])
            if layer.rope is not None:
                ops.rotary(heads[:, :rotated], *angles[layer.rope])
            attention.write(index, heads[:, config.heads :], prepared)
            attended = attention.attend(index, heads[:, : config.heads], prepared, layer.look)
            added = self._after(layer.out(attended.view(count, -1)), layer.after_attention)
            normed = self._normed(residual, added, layer.mlp_norm)
            added = self._after(layer.feed_forward(normed), layer.after_mlp)
        return residual if added is None else residual.add_(added)

    def _normed(self, residual: Tensor, added: Tensor | None, weight: Tensor) -> Tensor:
        """Adds what the part before gave to `residual`, in place, and norms the sum."""
        config = self.config
        if added is None:
            return self._ops.rms_norm(residual, weight, config.epsilon, None, config.norm_offset)
        return self._ops.rms_norm(added, weight, config.epsilon, residual, config.norm_offset)

    def _after(self, rows: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return rows
        return self._ops.rms_norm(rows, weight, self.config.epsilon, None, self.config.norm_offset)

    def _norm_heads(self, heads: Tensor, weight: Tensor) -> None:
        """Each of `[n, heads, head_dim]`, in place."""
        rows = heads.reshape(-1, self.config.head_dim)
        normed = self._ops.rms_norm(rows, weight, self.config.epsilon, None, self.config.norm_offset)
        heads.copy_(normed.view(heads.shape))

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """`[rows, vocabulary]`, float32, of these rows of a last hidden state."""
        config = self.config
        found = self._ops.rms_norm(hidden[rows], self._norm, config.epsilon, None, config.norm_offset)
        logits = self._head(found, wide=True)
        cap = config.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _places(config: DecoderConfig, checkpoint: Checkpoint) -> tuple[str, str]:
    """Where a checkpoint has the model, and the head."""
    if not config.nested:
        return "model", "lm_head"
    # The one is what older releases wrote, the other newer ones.
    if checkpoint.has("language_model.model.embed_tokens.weight"):
        return "language_model.model", "language_model.lm_head"
    return "model.language_model", "lm_head"


def _head_order(config: DecoderConfig) -> Tensor | None:
    """`[(heads + 2 * kv_heads) * head_dim]`: which output of the queries, keys and values goes where, where a
    part of each head is turned; None: all stay."""
    order = config.ropes[0].order() if config.ropes else None
    if order is None:
        return None
    dim, turned = config.head_dim, config.heads + config.kv_heads
    every = torch.arange((turned + config.kv_heads) * dim).view(-1, dim)
    every[:turned] = every[:turned, order]
    return every.view(-1)
