"""A prefill and a decode worker on the Triton kernels say what plain torch says, KV moved between them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from whole_fleet import Box, Memory

from engine.build import build_runner, plan_pool
from engine.runner import Runner
from engine.settings import EngineSettings
from fleet.kv_layout import KvLayout
from fleet.request import Sampling
from kv_transfer.settings import TransferSettings
from router.settings import CostSettings, RouterSettings

REMOTE = RouterSettings(cost=CostSettings(local_prefill_tokens=0, local_advantage=1e9))
PROMPTS = [[7 * i % 90 + 3 for i in range(start, start + length)] for start, length in ((0, 5), (9, 21))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of one layer."""
    made = tmp_path_factory.mktemp("tiny")
    hidden, inner, heads, kv, dim, vocabulary = 32, 48, 4, 2, 16, 100
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (vocabulary, hidden),
        "norm": (hidden,),
        "layers.0.input_layernorm": (hidden,),
        "layers.0.post_attention_layernorm": (hidden,),
        "layers.0.self_attn.q_proj": (heads * dim, hidden),
        "layers.0.self_attn.k_proj": (kv * dim, hidden),
        "layers.0.self_attn.v_proj": (kv * dim, hidden),
        "layers.0.self_attn.o_proj": (hidden, heads * dim),
        "layers.0.mlp.gate_proj": (inner, hidden),
        "layers.0.mlp.up_proj": (inner, hidden),
        "layers.0.mlp.down_proj": (hidden, inner),
    }
    torch.manual_seed(5)
    weights = {f"model.{name}.weight": torch.randn(shape) * 0.4 for name, shape in shapes.items()}
    save_file(weights, made / "model.safetensors")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    (made / "config.json").write_text(json.dumps(config))
    (made / "tokenizer.json").write_text("{}")
    return made


def answers(folder: Path, attention: str, apart: bool) -> list[list[int]]:
    settings = EngineSettings(
        block_size=8, max_batch=4, max_step_tokens=32, dtype="float32", attention=attention
    )

    def replica(settings: EngineSettings) -> tuple[KvLayout, Callable[[Memory], Runner]]:
        layout, _ = plan_pool(folder, settings)
        return layout, lambda memory: build_runner(folder, settings, memory, apart=apart)

    async def main() -> list[list[int]]:
        box = Box(
            1,
            1,
            blocks=40,
            engine=settings,
            router=REMOTE,
            transfer=TransferSettings(transport="shm"),
            replica=replica,
            real_links=True,
        )
        async with box:
            greedy = Sampling(max_tokens=3, temperature=0.0)
            asked = [box.ask(box.request(prompt, greedy, i)) for i, prompt in enumerate(PROMPTS)]
            found = await asyncio.gather(*asked)
            counters = box.workers["decode-0"].load().counters  # type: ignore[index]
            assert counters["pulled_tokens"] == sum(map(len, PROMPTS))
            assert counters["local_prefills"] == 0
            assert all(answer.error is None for answer in found)
            return [answer.tokens for answer in found]

    return asyncio.run(main())


def test_text_is_that_of_plain_torch(folder: Path) -> None:
    wanted = answers(folder, "gather", apart=False)
    assert len({tuple(tokens) for tokens in wanted}) == 2
    assert answers(folder, "triton", apart=True) == wanted
