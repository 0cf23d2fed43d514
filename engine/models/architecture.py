"""What a decoder is made of, in words, and how each architecture's config.json says it.

An architecture is a row of `ARCHITECTURES`: where it differs from the plain Llama. What is not in a row is
read from config.json the same way for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from engine.models.rope import MOST_POSITIONS, Rope, read_rope
from fleet.errors import BadRequest

_MOST = {
    "num_hidden_layers": 1 << 12,
    "num_experts": 1 << 16,
    "num_local_experts": 1 << 16,
    "max_position_embeddings": MOST_POSITIONS,
}
"""Of what is laid out before a checkpoint can tell that it is a mistake."""

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"

_ACTIVATIONS: dict[str, Literal["swiglu", "geglu"]] = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}
"""Of the gate, and the operation that it makes with the product."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """A mixture of experts in a checkpoint and in config.json."""

    module: str
    gate: str
    up: str
    down: str
    counts: tuple[str, ...]
    """Keys of config.json, one of which has how many there are."""
    inner: str
    """Key of the width of one."""
    always_normalised: bool
    """The weights of the chosen ones add up to 1; else config.json says so as norm_topk_prob."""


@dataclass(frozen=True, slots=True)
class Architecture:
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """What holds where config.json is silent."""
    qkv_bias: bool = False
    """Queries, keys and values have a bias, and the output has none, whatever attention_bias says."""
    fused: bool = False
    """One matrix of queries, keys and values, and one of gate and up."""
    head_norms: bool = False
    """Each head of queries and keys is normed before it is turned."""
    norms_after: bool = False
    """What attention and feed-forward give is normed before it is added."""
    norm_offset: float = 0.0
    """Added to the weights of norms."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by the root of their width."""
    caps: bool = False
    """config.json may ask for soft caps and a query scale of its own."""
    sliding: Literal["none", "all", "late", "pattern", "unturned"] = "none"
    """Which layers have the window, unless layer_types says so: none; all; those from max_window_layers on;
    all but each sliding_window_pattern-th; those without rotary positions."""
    asks_for_window: bool = False
    """There is a window only where use_sliding_window is true."""
    listed: bool = False
    """layer_types is read."""
    two_ropes: bool = False
    """Layers with a window have a rope of their own."""
    unturned: bool = False
    """Some layers have no rotary positions."""
    partial: bool = False
    """A part of each head may be turned only."""
    rope_names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Scalings by names that only this architecture gives them."""
    experts: ExpertNames | None = None
    nested: bool = False
    """The text model is a part of a larger one: config.json has it as text_config."""


_GEMMA_3 = {
    "defaults": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "head_norms": True,
    "norms_after": True,
    "norm_offset": 1.0,
    "scaled_embedding": True,
    "caps": True,
    "sliding": "pattern",
    "listed": True,
    "two_ropes": True,
}

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(sliding="all", defaults={"sliding_window": 4096}),
    "Qwen2ForCausalLM": Architecture(
        qkv_bias=True,
        sliding="late",
        asks_for_window=True,
        listed=True,
        defaults={"sliding_window": 4096, "max_window_layers": 28},
    ),
    "Qwen3ForCausalLM": Architecture(
        head_norms=True,
        sliding="late",
        asks_for_window=True,
        listed=True,
        defaults={"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "SmolLM3ForCausalLM": Architecture(
        unturned=True,
        sliding="unturned",
        asks_for_window=True,
        listed=True,
        defaults={"tie_word_embeddings": True, "rope_theta": 2e6, "no_rope_layer_interval": 4},
    ),
    "Phi3ForCausalLM": Architecture(
        fused=True,
        sliding="all",
        partial=True,
        rope_names={"su": "longrope", "yarn": "longrope"},
        defaults={"rms_norm_eps": 1e-5},
    ),
    "Gemma3ForCausalLM": Architecture(**_GEMMA_3),  # type: ignore[arg-type]
    "Gemma3ForConditionalGeneration": Architecture(nested=True, **_GEMMA_3),  # type: ignore[arg-type]
    "MixtralForCausalLM": Architecture(
        sliding="all",
        defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2},
        experts=ExpertNames(
            "block_sparse_moe", "w1", "w3", "w2", ("num_local_experts",), "intermediate_size", True
        ),
    ),
    "Qwen3MoeForCausalLM": Architecture(
        head_norms=True,
        sliding="all",
        asks_for_window=True,
        defaults={"sliding_window": 4096, "num_experts_per_tok": 8},
        experts=ExpertNames(
            "mlp",
            "gate_proj",
            "up_proj",
            "down_proj",
            ("num_experts", "num_local_experts"),
            "moe_intermediate_size",
            False,
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Experts:
    """A feed-forward of many, of which each token is given to few (Shazeer et al., 2017)."""

    names: ExpertNames
    count: int
    chosen: int
    """A token."""
    inner: int
    """Width of one."""
    normalised: bool
    """The weights of the chosen ones add up to 1."""


@dataclass(frozen=True, slots=True)
class Layer:
    rope: int | None
    """Which of the model's ropes; None: positions are not told."""
    window: int | None
    """Tokens that are seen, the row's own among them; None: all."""
    sparse: bool
    """Its feed-forward is a mixture of experts."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """All of a model but its weights. Its `repr` is part of the KV's fingerprint."""

    vocabulary: int
    hidden: int
    dense_inner: int
    """Width of a feed-forward that is not of experts."""
    layers: tuple[Layer, ...]
    ropes: tuple[Rope, ...]
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    """Of the scores."""
    epsilon: float
    norm_offset: float
    head_norms: bool
    norms_after: bool
    scaled_embedding: bool
    activation: Literal["swiglu", "geglu"]
    experts: Experts | None
    tied: bool
    """The head is the embedding."""
    fused: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    score_cap: float | None
    logit_cap: float | None
    max_tokens: int
    """Longest sequence for which the model is what its configuration says."""
    nested: bool

    @property
    def inner(self) -> int:
        """Width of the feed-forward a token, as memory is planned by it."""
        if self.experts is None:
            return self.dense_inner
        return max(self.dense_inner, self.experts.chosen * (self.experts.inner + self.hidden))

    @property
    def rope(self) -> str:
        """All ropes in a few words."""
        return "; ".join(map(str, self.ropes))

    @classmethod
    def read(cls, config: dict[str, Any]) -> DecoderConfig:
        """From the contents of config.json; BadRequest names what is missing or not supported."""
        try:
            return cls._read(config)
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise BadRequest(
                f"config.json has something of another kind than it should be: {error}"
            ) from error

    @classmethod
    def _read(cls, config: dict[str, Any]) -> DecoderConfig:
        names = config.get("architectures") or ["(none)"]
        name = str(names[0] if isinstance(names, list) else names)
        if name not in ARCHITECTURES:
            raise BadRequest(f"architecture {name} is not supported; supported: {', '.join(ARCHITECTURES)}")
        architecture = ARCHITECTURES[name]
        if config.get("quantization_config"):
            method = dict(config["quantization_config"]).get("quant_method", "unknown")
            raise BadRequest(
                f"quantized weights ({method}) are not supported; take the model's plain weights"
            )
        if architecture.nested:
            if not isinstance(config.get("text_config"), dict):
                raise BadRequest("config.json has no text_config")
            outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
            config = {**outer, **config["text_config"]}
        return _read(architecture, {**architecture.defaults, **config})


def _read(architecture: Architecture, config: dict[str, Any]) -> DecoderConfig:
    def need(key: str) -> int:
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadRequest(f"config.json has no number {key}")
        if value < 1:
            raise BadRequest(f"config.json has {key} {value}; it must be at least 1")
        if value > _MOST.get(key, 1 << 31):
            raise BadRequest(
                f"config.json has {key} {value}; at most {_MOST.get(key, 1 << 31)} can be served"
            )
        return value

    def above_zero(key: str, otherwise: float) -> float:
        value = config.get(key)
        value = otherwise if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise BadRequest(f"config.json has {key} {value!r}; it must be a number above 0")
        return float(value)

    def cap(key: str) -> float | None:
        given = architecture.caps and config.get(key) is not None
        return above_zero(key, 0.0) if given else None

    for key in ("rope_scaling", "rope_parameters"):
        if config.get(key) and not isinstance(config[key], dict):
            raise BadRequest(f"config.json has {key} {config[key]!r}; it must be an object")
    activation = config.get("hidden_activation") or config.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise BadRequest(f"hidden_act {activation!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    if config.get("use_bidirectional_attention"):
        raise BadRequest("use_bidirectional_attention is not supported: tokens see those before them")
    heads, hidden, count = need("num_attention_heads"), need("hidden_size"), need("num_hidden_layers")
    kv_heads = need("num_key_value_heads") if config.get("num_key_value_heads") else heads
    if heads % kv_heads:
        raise BadRequest(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = need("head_dim") if config.get("head_dim") else hidden // heads
    experts = _experts(architecture, config, need)
    layers, ropes, max_tokens = _layers(
        architecture, config, count, head_dim, need("max_position_embeddings")
    )
    attention_bias = bool(config.get("attention_bias", False))
    query_scale = above_zero("query_pre_attn_scalar", head_dim) if architecture.caps else float(head_dim)
    return DecoderConfig(
        vocabulary=need("vocab_size"),
        hidden=hidden,
        dense_inner=need("intermediate_size"),
        layers=layers,
        ropes=ropes,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=query_scale**-0.5,
        epsilon=above_zero("rms_norm_eps", 1e-6),
        norm_offset=architecture.norm_offset,
        head_norms=architecture.head_norms,
        norms_after=architecture.norms_after,
        scaled_embedding=architecture.scaled_embedding,
        activation=_ACTIVATIONS[activation],
        experts=experts,
        tied=bool(config.get("tie_word_embeddings", False)),
        fused=architecture.fused,
        qkv_bias=architecture.qkv_bias or attention_bias,
        out_bias=attention_bias and not architecture.qkv_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        score_cap=cap("attn_logit_softcapping"),
        logit_cap=cap("final_logit_softcapping"),
        max_tokens=max_tokens,
        nested=architecture.nested,
    )


def _experts(architecture: Architecture, config: dict[str, Any], need: Any) -> Experts | None:
    names = architecture.experts
    if names is None:
        return None
    count = need(next((key for key in names.counts if key in config), names.counts[0]))
    chosen = need("num_experts_per_tok")
    if chosen > count:
        raise BadRequest(f"num_experts_per_tok {chosen} is more than the {count} experts there are")
    normalised = names.always_normalised or bool(config.get("norm_topk_prob", False))
    return Experts(names, count, chosen, need(names.inner), normalised)


def _layers(
    architecture: Architecture, config: dict[str, Any], count: int, head_dim: int, longest: int
) -> tuple[tuple[Layer, ...], tuple[Rope, ...], int]:
    """What each layer is, the ropes they use, and the longest sequence that all of these allow."""
    turned = _turned(architecture, config, count)
    kinds = _kinds(architecture, config, turned)
    window = config.get("sliding_window")
    if architecture.asks_for_window and not config.get("use_sliding_window"):
        window = None
    if window is not None and (not isinstance(window, int) or window < 1):
        raise BadRequest(f"sliding_window is {window!r}; it must be a number of tokens, at least 1")
    ropes: list[Rope] = []
    places: dict[str, int] = {}
    lengths: list[int] = []
    for kind in dict.fromkeys(kinds):
        rope, exact = read_rope(
            _rope_settings(architecture, config, kind),
            head_dim=head_dim,
            longest=longest,
            original=config.get("original_max_position_embeddings"),
            partial=architecture.partial,
        )
        lengths.append(exact)
        if rope not in ropes:
            ropes.append(rope)
        places[kind] = ropes.index(rope)
    layers = tuple(
        Layer(
            rope=places[kind] if turned[index] else None,
            window=window if kind == _LOCAL else None,
            sparse=_sparse(architecture, config, index),
        )
        for index, kind in enumerate(kinds)
    )
    # A scaling by hand reaches further than the configuration says; one that is not exact, less far.
    return layers, tuple(ropes), min(lengths) if min(lengths) < longest else max(lengths)


def _turned(architecture: Architecture, config: dict[str, Any], count: int) -> list[bool]:
    """Which layers have rotary positions."""
    if not architecture.unturned:
        return [True] * count
    listed = config.get("no_rope_layers")
    if listed is None:
        every = int(config["no_rope_layer_interval"])
        if every < 1:
            raise BadRequest(f"no_rope_layer_interval is {every}; it must be at least 1")
        return [(index + 1) % every != 0 for index in range(count)]
    if not isinstance(listed, list) or len(listed) < count:
        raise BadRequest(f"no_rope_layers wants {count} numbers, one a layer")
    return [bool(one) for one in listed[:count]]


def _kinds(architecture: Architecture, config: dict[str, Any], turned: list[bool]) -> list[str]:
    """Of each layer, in the words of layer_types."""
    listed, count = config.get("layer_types"), len(turned)
    if architecture.listed and listed is not None:
        if len(listed) != count:
            raise BadRequest(f"layer_types has {len(listed)} layers; num_hidden_layers is {count}")
        for kind in listed:
            if kind not in (_GLOBAL, _LOCAL):
                raise BadRequest(f"layer type {kind!r} is not supported; supported: {_GLOBAL}, {_LOCAL}")
        return list(listed)
    rules: dict[str, Callable[[int], bool]] = {
        "none": lambda _: False,
        "all": lambda _: True,
        "late": lambda index: index >= config["max_window_layers"],
        "pattern": lambda index: (index + 1) % config["sliding_window_pattern"] != 0,
        "unturned": lambda index: not turned[index],
    }
    if architecture.sliding == "pattern" and config["sliding_window_pattern"] == 0:
        raise BadRequest("sliding_window_pattern is 0; it must be at least 1")
    local = rules[architecture.sliding]
    return [_LOCAL if local(index) else _GLOBAL for index in range(count)]


def _rope_settings(architecture: Architecture, config: dict[str, Any], kind: str) -> dict[str, Any]:
    """From either spelling: `rope_parameters`, by kind of layer or for all, or `rope_theta` with
    `rope_scaling`, which layers with a rope of their own do not take part in."""
    own = architecture.two_ropes and kind == _LOCAL
    theta = config.get("rope_local_base_freq", 10000.0) if own else config.get("rope_theta", 10000.0)
    rope: dict[str, Any] = {"rope_theta": theta}
    if "partial_rotary_factor" in config:
        rope["partial_rotary_factor"] = config["partial_rotary_factor"]
    given = config.get("rope_parameters") or {}
    by_kind = _GLOBAL in given or _LOCAL in given
    if not own:
        rope |= config.get("rope_scaling") or {}
    if by_kind:
        rope |= given.get(kind) or {}
    elif not own:
        rope |= given
    for key in ("rope_type", "type"):
        if rope.get(key) in architecture.rope_names:
            rope[key] = architecture.rope_names[rope[key]]
    return rope


def _sparse(architecture: Architecture, config: dict[str, Any], index: int) -> bool:
    if architecture.experts is None or index in (config.get("mlp_only_layers") or ()):
        return False
    return (index + 1) % int(config.get("decoder_sparse_step") or 1) == 0
