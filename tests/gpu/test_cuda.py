"""What only a CUDA device can show: captured graphs, memory that runs out, uploads that follow each other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build import build_runner
from engine.settings import EngineSettings
from engine.torch_runner import TorchRunner
from engine.words import Batch, Chunk
from fleet.request import Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GREEDY = Sampling(1 << 20, temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.torch import save_file

    made = tmp_path_factory.mktemp("random")
    hidden, inner, heads, kv, dim, vocabulary = 256, 512, 4, 2, 64, 512
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (vocabulary, hidden), "norm": (hidden,)}
    for layer in range(2):
        at = f"layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm": (hidden,),
            f"{at}.post_attention_layernorm": (hidden,),
            f"{at}.self_attn.q_proj": (heads * dim, hidden),
            f"{at}.self_attn.k_proj": (kv * dim, hidden),
            f"{at}.self_attn.v_proj": (kv * dim, hidden),
            f"{at}.self_attn.o_proj": (hidden, heads * dim),
            f"{at}.mlp.gate_proj": (inner, hidden),
            f"{at}.mlp.up_proj": (inner, hidden),
            f"{at}.mlp.down_proj": (hidden, inner),
        }
    torch.manual_seed(3)
    save_file(
        {f"model.{name}.weight": torch.randn(shape) * 0.1 for name, shape in shapes.items()},
        made / "model.safetensors",
    )
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    (made / "config.json").write_text(json.dumps(config))
    (made / "tokenizer.json").write_text("{}")
    return made


def runner_of(folder: Path, **settings: Any) -> TorchRunner:
    given = {"dtype": "float32", "device": "cuda", "kv_memory_bytes": 64 << 20, **settings}
    runner = build_runner(folder, EngineSettings(**given))
    assert isinstance(runner, TorchRunner)
    return runner


def texts(runner: TorchRunner, lengths: tuple[int, ...], new: int) -> Iterator[list[int]]:
    """Each prompt by itself, then all of them decoded together."""
    known = [[7 * i % 500 for i in range(3, 3 + length)] for length in lengths]
    tables = [tuple(range(40 * i, 40 * i + 40)) for i in range(len(lengths))]
    for tokens, table in zip(known, tables, strict=True):
        step = Batch((Chunk(0, tuple(tokens), 0, table, True, GREEDY),))
        tokens.append(runner.step(step).tokens[0] or 0)
    for _ in range(new):
        chunks = [
            Chunk(i, (tokens[-1],), len(tokens) - 1, table, True, GREEDY)
            for i, (tokens, table) in enumerate(zip(known, tables, strict=True))
        ]
        for tokens, token in zip(known, runner.step(Batch(tuple(chunks))).tokens, strict=True):
            tokens.append(token or 0)
    yield from known


@pytest.mark.parametrize("lengths", [(5,), (600, 3, 17), (16,) * 9])
def test_graphs_say_what_eager_steps_and_plain_torch_say(folder: Path, lengths: tuple[int, ...]) -> None:
    graphs = list(texts(runner_of(folder), lengths, 12))
    assert graphs == list(texts(runner_of(folder, graphs=False), lengths, 12))
    assert graphs == list(texts(runner_of(folder, attention="gather", graphs=False), lengths, 12))


def test_graphs_are_used(folder: Path) -> None:
    runner = runner_of(folder, max_batch=16)
    assert runner._graphs is not None
    assert runner._graphs.sizes == (1, 2, 4, 8, 16)


@pytest.mark.parametrize("settings", [{}, {"graphs": False}], ids=["graphs", "eager"])
def test_steps_asked_for_before_tokens_are_known_say_what_one_after_the_other_says(
    folder: Path, settings: dict[str, Any]
) -> None:
    lengths, new = (600, 3, 17), 12
    runner = runner_of(folder, **settings)

    async def ahead() -> list[list[int | None]]:
        tables = [tuple(range(40 * i, 40 * i + 40)) for i in range(len(lengths))]
        asked = []
        for slot, (length, table) in enumerate(zip(lengths, tables, strict=True)):
            prompt = tuple(7 * i % 500 for i in range(3, 3 + length))
            asked.append(runner.run(Batch((Chunk(slot, prompt, 0, table, True, GREEDY),))))
        for step in range(new):
            chunks = [
                Chunk(slot, (0,), length + step, table, True, GREEDY, carried=True)
                for slot, (length, table) in enumerate(zip(lengths, tables, strict=True))
            ]
            asked.append(runner.run(Batch(tuple(chunks))))
        results = await asyncio.gather(*asked)
        return [
            [results[slot].tokens[0], *(result.tokens[slot] for result in results[len(lengths) :])]
            for slot in range(len(lengths))
        ]

    known = list(texts(runner, lengths, new))
    assert asyncio.run(ahead()) == [tokens[length:] for tokens, length in zip(known, lengths, strict=True)]


def test_a_step_that_runs_out_of_memory_costs_nobody_anything(folder: Path) -> None:
    runner = runner_of(folder, max_step_tokens=1024)
    prompt = tuple(7 * i % 500 for i in range(1024))
    whole = Batch((Chunk(0, prompt, 0, tuple(range(64)), True, GREEDY),))
    wanted = runner.step(whole).tokens
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    hoard: list[torch.Tensor] = []
    try:
        # All that the allocator has left, large pieces first; then as much back as a part of the step takes.
        for size, back in ((3 << 19, 4), (1 << 19, 12)):
            taken: list[torch.Tensor] = []
            while True:
                try:
                    taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    break
            hoard += taken[: max(0, len(taken) - back)]
        assert asyncio.run(runner.run(whole)).tokens == wanted
        assert runner._sparing.splits > 0
    finally:
        hoard.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert runner.step(whole).tokens == wanted
