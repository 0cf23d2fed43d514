"""Small random models as folders, and a driver that steps a runner through sequences without an engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from msgspec.structs import replace

from engine.build import build_runner
from engine.settings import EngineSettings
from engine.torch_runner import TorchRunner
from engine.words import Batch, BatchResult, Chunk
from fleet.request import Sampling, TokenLogprobs

_SMALL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_PADDED = {"pad_token_id": 0}
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm": ("Llama", {"tie_word_embeddings": True}),
    "llama2": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama3": ("Llama", {"rope_parameters": _LLAMA3, "num_key_value_heads": 1, "head_dim": 16}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 24, "head_dim": 8}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-late-window": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 11,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3-windows": (
        "Qwen3",
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 16,
            "sliding_window": 13,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 4.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True, **_PADDED}),
    "smollm3-windows": (
        "SmolLM3",
        {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 10, **_PADDED},
    ),
    "phi3": ("Phi3", {"sliding_window": 19, **_PADDED}),
    "phi3-longrope": (
        "Phi3",
        {
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.1, 1.7],
                "long_factor": [2.0, 9.0],
            },
            **_PADDED,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 30}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 8,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe-normalised": (
        "Qwen3Moe",
        {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
        },
    ),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}}),
    "yarn": ("Qwen3", {"head_dim": 16, "rope_parameters": _YARN}),
    "yarn-magnitude": (
        "Llama",
        {
            "head_dim": 32,
            "rope_parameters": {**_YARN, "mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False},
        },
    ),
}


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a random model, one of `_VARIANTS`."""
    made: dict[str, Path] = {}

    def make(variant: str) -> Path:
        if variant not in made:
            family, changes = _VARIANTS[variant]
            config = getattr(transformers, f"{family}Config")(**{**_SMALL, **changes})
            torch.manual_seed(len(variant))
            model = transformers.AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for name, values in model.named_parameters():
                    # Far from the usual start: a bias of 0 or a norm of 1 would hide that it is not used.
                    values.normal_(1.0 if "norm" in name else 0.0, 0.3)
            folder = tmp_path_factory.mktemp(variant)
            model.save_pretrained(folder, max_shard_size="60KB" if variant == "qwen2" else "1GB")
            (folder / "tokenizer.json").write_text("{}")
            made[variant] = folder
        return made[variant]

    return make


@pytest.fixture
def small_runner(small_model: Callable[[str], Path]) -> Callable[..., TorchRunner]:
    """A float32 runner of a random model."""

    def make(variant: str = "smollm", **settings: Any) -> TorchRunner:
        given = {"dtype": "float32", "device": "cpu", "kv_memory_bytes": 2 << 20, **settings}
        runner = build_runner(small_model(variant), EngineSettings(**given))
        assert isinstance(runner, TorchRunner)
        return runner

    return make


GREEDY = Sampling(max_tokens=1 << 20, temperature=0)


@dataclass
class Driven:
    """A sequence as the driver knows it."""

    prompt: list[int]
    sampling: Sampling
    blocks: list[int]
    computed: int = 0
    drawn: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)


class Driver:
    """Steps a runner through sequences, its blocks scattered over the pool."""

    def __init__(self, runner: TorchRunner, seed: int = 0) -> None:
        self.runner = runner
        self._free = list(range(runner.blocks))
        random.Random(seed).shuffle(self._free)

    def add(
        self,
        prompt: Sequence[int],
        room: int,
        sampling: Sampling = GREEDY,
        after: Driven | None = None,
        shared: int = 0,
    ) -> Driven:
        """A sequence with room for so many new tokens; the first `shared` tokens' KV is that of `after`."""
        size = self.runner.layout.block_size
        kept = after.blocks[: shared // size] if after else []
        count = self.runner.layout.blocks_for(len(prompt) + room) - len(kept)
        blocks = kept + [self._free.pop() for _ in range(count)]
        return Driven(list(prompt), sampling, blocks, len(kept) * size)

    def step(self, sequences: Sequence[Driven], chunk: int = 1 << 20) -> None:
        """Each sequence is computed further by at most `chunk` tokens."""
        chunks = []
        for slot, sequence in enumerate(sequences):
            known = sequence.prompt + sequence.drawn
            end = min(len(known), sequence.computed + chunk)
            chunks.append(
                Chunk(
                    slot=slot,
                    tokens=tuple(known[sequence.computed : end]),
                    start=sequence.computed,
                    blocks=tuple(sequence.blocks),
                    draw=end == len(known),
                    sampling=sequence.sampling,
                    history=tuple(known),
                    prompt_length=len(sequence.prompt),
                )
            )
            sequence.computed = end
        result = self.runner.step(Batch(tuple(chunks)))
        logprobs = result.logprobs or (None,) * len(chunks)
        for sequence, token, found in zip(sequences, result.tokens, logprobs, strict=True):
            if token is not None:
                sequence.drawn.append(token)
                sequence.logprobs.append(found)

    def run(self, sequences: Sequence[Driven], new: int, chunk: int = 1 << 20) -> list[list[int]]:
        """Steps all of them together until each has drawn `new` tokens."""
        while left := [sequence for sequence in sequences if len(sequence.drawn) < new]:
            self.step(left, chunk)
        return [sequence.drawn for sequence in sequences]


@pytest.fixture
def drive() -> type[Driver]:
    return Driver


class Carrying:
    """A runner's steps with every token left out that it has drawn itself in the step before."""

    def __init__(self, runner: TorchRunner, step: Callable[[Batch], BatchResult]) -> None:
        self.layout, self.blocks = runner.layout, runner.blocks
        self._step = step
        self._drew: set[int] = set()
        self.carried = 0

    def step(self, batch: Batch) -> BatchResult:
        chunks = tuple(
            replace(chunk, tokens=(0,), carried=True)
            if len(chunk.tokens) == 1 and chunk.slot in self._drew
            else chunk
            for chunk in batch.chunks
        )
        self.carried += sum(chunk.carried for chunk in chunks)
        self._drew = {chunk.slot for chunk in chunks if chunk.draw}
        return self._step(Batch(chunks))


@pytest.fixture
def carry() -> type[Carrying]:
    return Carrying
