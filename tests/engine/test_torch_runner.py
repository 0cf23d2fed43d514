"""From a folder to a runner: pool size, fingerprint, settings, and what is said of a wrong folder."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.build import build_runner, choose_device, choose_dtype, latency_model, plan_pool
from engine.latency_runner import LatencyModel, LatencyRunner
from engine.settings import EngineSettings
from engine.torch_runner import TorchRunner
from engine.words import Batch, Chunk
from fleet.errors import BadRequest
from fleet.kv_layout import KvLayout
from fleet.request import Sampling

SETTINGS = EngineSettings(dtype="float32", device="cpu", kv_memory_bytes=1 << 20)
GREEDY = Sampling(max_tokens=10, temperature=0)


@pytest.fixture
def folder(small_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(small_model("smollm"), tmp_path / "model"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def test_pool_size_follows_from_the_memory_given(folder: Path) -> None:
    layout, blocks = plan_pool(folder, SETTINGS)
    assert layout == KvLayout(layers=3, kv_heads=2, head_dim=8, block_size=16, dtype="float32")
    assert blocks == (1 << 20) // layout.block_bytes
    with pytest.raises(BadRequest, match="holds no block; one is 6144 bytes"):
        plan_pool(folder, replace(SETTINGS, kv_memory_bytes=1000))


def test_a_runner_computes_in_memory_that_others_gave(folder: Path) -> None:
    layout, blocks = plan_pool(folder, SETTINGS)
    memory = np.zeros((blocks, layout.block_bytes), dtype=np.uint8)
    runner = build_runner(folder, SETTINGS, memory)
    chunk = Chunk(0, (5, 6, 7), 0, (9,), True, GREEDY)
    first = asyncio.run(runner.run(Batch((chunk,))))
    assert memory[9].any()
    assert not memory[:9].any()
    # What one process wrote, another reads: here, a runner over a copy of the bytes.
    other = build_runner(folder, SETTINGS, memory.copy())
    token = first.tokens[0]
    assert token is not None
    following = Batch((Chunk(0, (token,), 3, (9,), True, GREEDY),))
    assert asyncio.run(other.run(following)) == asyncio.run(runner.run(following))
    asyncio.run(runner.close())
    asyncio.run(other.close())


def test_memory_of_another_shape_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"wanted uint8 \[blocks, 6144\]"):
        build_runner(folder, SETTINGS, np.zeros((3, 100), dtype=np.uint8))


def test_fingerprint_is_of_the_content_not_the_place(
    folder: Path, small_model: Callable[[str], Path]
) -> None:
    def fingerprint() -> Any:
        return build_runner(folder, SETTINGS).fingerprint

    first = fingerprint()
    assert build_runner(small_model("smollm"), SETTINGS).fingerprint == first
    change_config(folder, transformers_version="0")
    assert fingerprint() == first

    def nudge(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.2.mlp.down_proj.weight"][-1, -1] += 1e-3

    change_weights(folder, nudge)
    nudged = fingerprint()
    assert str(first.mismatch(nudged)).startswith("model: ")
    (folder / "tokenizer.json").write_text('{"other": 1}')
    assert str(nudged.mismatch(fingerprint())).startswith("tokenizer: ")
    change_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    assert "theta=77.0" in fingerprint().rope


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture GPT2LMHeadModel is not supported; supported: Llama",
        ),
        ({"architectures": None}, r"architecture \(none\)"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "mrope", "rope_theta": 2.0}}, "rotary scaling 'mrope' is not"),
        (
            {"rope_scaling": {"type": "linear"}, "rope_parameters": None},
            "scaling 'linear' has no number factor",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0]}},
            "wants 4 numbers as short_factor",
        ),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantized weights \(fp8\) are not supported"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0; it must be at least 1"),
        ({"num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3"),
        ({"hidden_size": None}, "no number hidden_size"),
        ({"intermediate_size": 40}, r"layers.0.mlp.gate_proj.weight has shape \(48, 32\); .* \(40, 32\)"),
        ({"num_hidden_layers": 4}, "no tensor model.layers.3"),
        ({"num_hidden_layers": 2}, "9 tensors this model does not know, such as model.layers.2"),
        ({"tie_word_embeddings": False}, "no tensor lm_head.weight"),
        ({"attention_bias": True}, "no tensor model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_a_config_that_does_not_fit_is_named(folder: Path, changes: dict[str, Any], said: str) -> None:
    change_config(folder, **changes)
    with pytest.raises(BadRequest, match=said):
        build_runner(folder, SETTINGS)


def test_a_folder_that_lacks_files_is_named(folder: Path, small_model: Callable[[str], Path]) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadRequest, match=r"no \.safetensors file"):
        build_runner(folder, SETTINGS)
    (folder / "config.json").write_text("{")
    with pytest.raises(BadRequest, match=r"config\.json cannot be read as JSON"):
        plan_pool(folder, SETTINGS)
    sharded = Path(shutil.copytree(small_model("qwen2"), folder.parent / "sharded"))
    shards = sorted(sharded.glob("*.safetensors"))
    assert len(shards) > 1
    shards[0].unlink()
    with pytest.raises(BadRequest, match=f"has no file {shards[0].name}"):
        build_runner(sharded, SETTINGS)


def test_loading_reports_its_progress(folder: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    build_runner(folder, SETTINGS, progress=lambda *call: calls.append(call))
    assert calls[0][:2] == ("load", 1)
    assert calls[-1] == ("load", 29, 29)


def test_a_tensor_of_numbers_that_are_not_weights_is_named(folder: Path) -> None:
    def narrow(weights: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.mlp.down_proj.weight"
        weights[name] = weights[name].to(torch.float8_e4m3fn)

    change_weights(folder, narrow)
    with pytest.raises(
        BadRequest, match=r"model\.layers\.1\.mlp\.down_proj\.weight is F8_E4M3; supported: F32"
    ):
        build_runner(folder, SETTINGS)
    (folder / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(BadRequest, match=r"model\.safetensors is not a readable safetensors file"):
        build_runner(folder, SETTINGS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_stay_near_the_wide_one(
    dtype: str, small_runner: Callable[..., TorchRunner], drive: Any
) -> None:
    seen = Sampling(max_tokens=10, temperature=0, logprobs=160)
    found = []
    for kind in ("float32", dtype):
        driver = drive(small_runner("smollm", dtype=kind))
        sequence = driver.add(range(3, 60), 1, seen)
        driver.run([sequence], 1, chunk=20)
        found.append(dict(sequence.logprobs[0].top))
    wide, narrow = found
    difference = [abs(wide[token] - narrow[token]) for token in wide]
    assert sum(difference) / len(difference) < 0.15
    assert max(difference) > 0


def test_a_failing_step_leaves_the_next_one_alone(small_runner: Callable[..., TorchRunner]) -> None:
    runner = small_runner()
    good = Batch((Chunk(0, (5,), 0, (0,), True, GREEDY),))

    async def steps() -> None:
        before = await runner.run(good)
        with pytest.raises(IndexError):
            await runner.run(Batch((Chunk(0, (10**6,), 0, (1,), True, GREEDY),)))
        assert await runner.run(good) == before
        await runner.close()

    asyncio.run(steps())


def test_the_event_loop_goes_on_during_a_step(small_runner: Callable[..., TorchRunner]) -> None:
    runner = small_runner()
    batch = Batch((Chunk(0, tuple(range(3, 150)) * 6, 0, tuple(range(60)), True, GREEDY),))

    async def steps() -> int:
        running = asyncio.ensure_future(runner.run(batch))
        turns = 0
        while not running.done():
            turns += 1
            await asyncio.sleep(0)
        await running
        await runner.close()
        return turns

    assert asyncio.run(steps()) > 10


def test_latency_models_are_named_with_their_times() -> None:
    assert latency_model("smollm2") is None
    assert latency_model("latency") == LatencyModel()
    assert latency_model("latency:base=5,decode=0.25") == LatencyModel(base_s=0.005, per_decode_s=0.00025)
    with pytest.raises(BadRequest, match="'speed=3' in model"):
        latency_model("latency:speed=3")
    layout, blocks = plan_pool("latency:base=1", SETTINGS)
    assert blocks == (1 << 20) // layout.block_bytes
    memory = np.zeros((blocks, layout.block_bytes), dtype=np.uint8)
    runner = build_runner("latency:base=1", SETTINGS, memory)
    assert isinstance(runner, LatencyRunner)
    assert runner.latency == LatencyModel(base_s=0.001)
    assert runner.memory is memory


def test_device_and_dtype_are_chosen_or_refused_by_name() -> None:
    cpu = torch.device("cpu")
    assert choose_device("cpu") == cpu
    with pytest.raises(BadRequest, match="device 'gpu'"):
        choose_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(BadRequest, match="sees no CUDA device"):
            choose_device("cuda:0")
    assert choose_dtype("float16", cpu) == "float16"
    assert choose_dtype("auto", cpu) in ("float32", "bfloat16")
    assert choose_dtype("auto", torch.device("cuda")) == "bfloat16"
    with pytest.raises(BadRequest, match="dtype 'int4' is not one of float32"):
        choose_dtype("int4", cpu)
