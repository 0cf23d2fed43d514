"""Each architecture computes what `transformers` does: alone, in chunks, mixed, and from a cached prefix."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from parity import SEEN, check, load, prompt, reference, seen
from safetensors.torch import load_file, save_file

from engine.build import build_runner, fingerprint, plan_pool, read_config
from engine.linear import Linears
from engine.models.architecture import DecoderConfig
from engine.models.experts import Dense, Grouped, Looped
from engine.ops import TorchOps
from engine.settings import EngineSettings
from engine.torch_runner import TorchRunner
from fleet.errors import BadRequest
from fleet.kv_layout import Fingerprint

SETTINGS = EngineSettings(dtype="float32", device="cpu", kv_memory_bytes=2 << 20)
VARIANTS = [
    "smollm",
    "llama2",
    "llama3",
    "llama-biases",
    "qwen2",
    "mistral",
    "qwen2-late-window",
    "qwen3",
    "qwen3-windows",
    "gemma3",
    "smollm3",
    "smollm3-windows",
    "phi3",
    "phi3-longrope",
    "mixtral",
    "qwen3-moe",
    "qwen3-moe-normalised",
    "linear",
    "dynamic",
    "yarn",
    "yarn-magnitude",
]


def changed(
    folder: Path,
    into: Path,
    weights: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None,
    **changes: Any,
) -> Path:
    """A copy with another config.json and other weights."""
    copy = Path(shutil.copytree(folder, into / "model"))
    (copy / "config.json").write_text(json.dumps(read_config(folder) | changes))
    if weights is not None:
        save_file(weights(load_file(copy / "model.safetensors")), copy / "model.safetensors")
    return copy


def runner_of(folder: Path) -> TorchRunner:
    runner = build_runner(folder, SETTINGS)
    assert isinstance(runner, TorchRunner)
    return runner


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_architecture_is_the_reference(
    variant: str, small_model: Callable[[str], Path], small_runner: Callable[..., TorchRunner], drive: Any
) -> None:
    model = load(small_model(variant))
    driver = drive(small_runner(variant))
    together = [driver.add(prompt(length), 6, SEEN) for length in (1, 5, 16, 17, 60)]
    driver.run(together, 6)
    chunked = [driver.add(prompt(length, 1), 6, SEEN) for length in (40, 90)]
    driver.run(chunked, 6, chunk=17)
    longer = together[-1].prompt + together[-1].drawn + prompt(9)
    warm = driver.add(longer, 6, SEEN, after=together[-1], shared=48)
    driver.run([warm], 6)
    for sequence in (*together, *chunked, warm):
        check(model, sequence)


def test_a_score_cap_is_where_the_definition_has_it(
    small_model: Callable[[str], Path], small_runner: Callable[..., TorchRunner], drive: Any, tmp_path: Path
) -> None:
    """`transformers` reads the cap of this family and leaves it out: here its own eager attention has it."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.models.gemma3.modeling_gemma3 import eager_attention_forward

    folder = changed(small_model("gemma3"), tmp_path, attn_logit_softcapping=0.7)
    transformers.AttentionInterface.register(
        "capped", lambda *given, **named: eager_attention_forward(*given, **{**named, "softcap": 0.7})
    )
    ALL_MASK_ATTENTION_FUNCTIONS.register("capped", eager_mask)
    driver = drive(runner_of(folder))
    sequence = driver.add(prompt(40), 4, SEEN)
    driver.run([sequence], 4, chunk=15)
    check(load(folder, "capped"), sequence)
    plain = reference(load(folder), sequence.prompt)[-1]
    assert (plain - seen(sequence)[0]).abs().max() > 0.05, "the cap changes something"


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_inside_a_larger_one(
    prefix: str, small_model: Callable[[str], Path], drive: Any, tmp_path: Path
) -> None:
    def inside(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        text = {prefix + name.removeprefix("model."): values for name, values in weights.items()}
        return {**text, "vision_tower.patch.weight": torch.ones(3)}

    plain = small_model("gemma3")
    folder = changed(plain, tmp_path, weights=inside)
    text = json.loads((folder / "config.json").read_text())
    for silent in ("tie_word_embeddings", "architectures", "rms_norm_eps"):
        text.pop(silent, None)
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(whole))
    driver = drive(runner_of(folder))
    sequence = driver.add(prompt(30), 4, SEEN)
    driver.run([sequence], 4)
    check(load(plain), sequence)


@pytest.mark.parametrize("chosen", [1, 2, 3])
def test_experts_that_are_all_the_dense_one_are_the_dense_one(
    chosen: int, small_model: Callable[[str], Path], drive: Any, tmp_path: Path
) -> None:
    """Whatever the router says: its weights add up to 1."""
    rows = torch.randn(3, 32, generator=torch.Generator().manual_seed(chosen))

    def copied(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = {}
        for name, values in weights.items():
            at, found, part = name.partition(".mlp.")
            if not found:
                made[name] = values
                continue
            expert = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[part.removesuffix(".weight")]
            for index in range(3):
                made[f"{at}.block_sparse_moe.experts.{index}.{expert}.weight"] = values.clone()
            made[f"{at}.block_sparse_moe.gate.weight"] = rows.clone()
        return made

    dense = small_model("llama2")
    folder = changed(
        dense,
        tmp_path,
        weights=copied,
        architectures=["MixtralForCausalLM"],
        num_local_experts=3,
        num_experts_per_tok=chosen,
    )
    found = []
    for each in (dense, folder):
        driver = drive(runner_of(each))
        sequences = [driver.add(prompt(length), 8, SEEN) for length in (1, 50)]
        driver.run(sequences, 8, chunk=20)
        found.append([(one.drawn, seen(one)) for one in sequences])
    for (tokens, wanted), (drawn, values) in zip(*found, strict=True):
        assert drawn == tokens
        torch.testing.assert_close(values, wanted, atol=2e-5, rtol=1e-5)


def test_grouped_products_are_the_loop() -> None:
    """The form that CUDA runs, over experts with many, one and no rows."""
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(4, 32, 16, generator=generator)
    down = torch.randn(4, 16, 16, generator=generator)
    ops, linears = TorchOps(), Linears()
    each = [
        Dense(linears.make(above), linears.make(below), ops.swiglu)
        for above, below in zip(gate_up, down, strict=True)
    ]
    grouped = Grouped(gate_up, down, ops.swiglu)
    for counts in ([3, 0, 1, 5], [0, 0, 0, 1], [9, 0, 0, 0]):
        rows, numbers = torch.randn(sum(counts), 16, generator=generator), torch.tensor(counts)
        torch.testing.assert_close(grouped(rows, numbers), Looped(each)(rows, numbers), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["gemma3", "qwen3-moe", "phi3-longrope", "qwen3"])
def test_narrow_types_stay_near(
    variant: str, small_model: Callable[[str], Path], small_runner: Callable[..., TorchRunner], drive: Any
) -> None:
    expected = reference(load(small_model(variant)), prompt(50))[-1]
    for settings, most in (({"dtype": "bfloat16"}, 0.25), ({"weights": "int8"}, 0.3)):
        driver = drive(small_runner(variant, **settings))
        sequence = driver.add(prompt(50), 1, SEEN)
        driver.run([sequence], 1, chunk=20)
        difference = (seen(sequence)[0] - expected).abs().mean()
        assert 0 < difference < most, settings


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # to infinity, as it is meant
def test_by_triton_kernels(
    small_model: Callable[[str], Path], small_runner: Callable[..., TorchRunner], drive: Any
) -> None:
    if torch.cuda.is_available():
        pytest.skip("tests/gpu has it")
    driver = drive(small_runner("gemma3", attention="triton", block_size=8))
    sequence = driver.add(prompt(18), 2, SEEN)
    driver.run([sequence], 2, chunk=10)
    check(load(small_model("gemma3")), sequence)


# What is served, and what is refused ----------------------------------------------------------------------


def test_how_long_sequences_may_be(small_model: Callable[[str], Path]) -> None:
    """As long as the positions are exact, whatever the window."""
    for variant, most in {
        "mistral": 2048,
        "phi3-longrope": 256,
        "dynamic": 2048,
        "linear": 2048,
        "yarn": 2048,
        "gemma3": 2048,
    }.items():
        assert DecoderConfig.read(read_config(small_model(variant))).max_tokens == most, variant
    by_hand = read_config(small_model("yarn")) | {"max_position_embeddings": 40}
    assert DecoderConfig.read(by_hand).max_tokens == 4 * 32


def test_models_that_differ_in_what_kv_means_never_share_it(small_model: Callable[[str], Path]) -> None:
    def of(variant: str, **changes: Any) -> Fingerprint:
        folder = small_model(variant)
        layout, _ = plan_pool(folder, SETTINGS)
        return fingerprint(folder, read_config(folder) | changes, layout)

    longrope = read_config(small_model("phi3-longrope"))["rope_parameters"]
    changes: list[tuple[str, dict[str, Any]]] = [
        ("mistral", {"sliding_window": 25}),
        ("mistral", {"rms_norm_eps": 1e-3}),
        ("qwen3-windows", {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}),
        ("qwen3-windows", {"use_sliding_window": False}),
        ("smollm3", {"no_rope_layers": [1, 1, 1]}),
        ("gemma3", {"query_pre_attn_scalar": 25}),
        ("gemma3", {"attn_logit_softcapping": 3.0}),
        ("qwen3-moe", {"num_experts_per_tok": 2}),
        ("qwen3-moe", {"norm_topk_prob": True}),
        ("phi3-longrope", {"rope_parameters": {**longrope, "short_factor": [1.1, 1.8]}}),
        ("phi3-longrope", {"rope_parameters": {**longrope, "attention_factor": 1.5}}),
        ("linear", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
        ("linear", {"architectures": ["Qwen3ForCausalLM"], "head_dim": 8}),
    ]
    for variant, change in changes:
        assert of(variant).mismatch(of(variant, **change)) is not None, (variant, change)
    first, second = of("linear"), of("linear", rope_parameters=None, rope_theta=1e4)
    assert str(first.mismatch(second)).startswith(("model:", "rope:"))
    assert "linear theta=10000.0" in first.rope
    spelt = {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 3.0}}
    assert of("linear", **spelt) == of("linear"), "the same by an older spelling"


@pytest.mark.parametrize(
    ("variant", "changes", "said"),
    [
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types has 1 layers; num_hidden_layers is 3"),
        ("gemma3", {"layer_types": ["full_attention"] * 2 + ["chunked"]}, "layer type 'chunked'"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "no text_config"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers wants 3 numbers"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 5 experts"),
        ("mixtral", {"num_local_experts": None}, "no number num_local_experts"),
        ("qwen3-moe", {"num_local_experts": 5}, r"mlp\.gate\.weight has shape \(6, 32\)"),
        ("qwen3-moe", {"mlp_only_layers": []}, r"no tensor model\.layers\.1\.mlp\.gate\.weight"),
        ("qwen3-moe", {"mlp_only_layers": [0, 1]}, r"no tensor model\.layers\.0\.mlp\.gate_proj"),
        ("phi3-longrope", {"partial_rotary_factor": 0.4, "rope_parameters": None}, "3 of 8 numbers"),
        ("yarn", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_theta is 1.0"),
        ("qwen3", {"architectures": ["Qwen2ForCausalLM"]}, r"such as model.layers.0.self_attn.k_norm"),
    ],
)
def test_what_does_not_fit_is_named(
    variant: str, changes: dict[str, Any], said: str, small_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = changed(small_model(variant), tmp_path, **changes)
    with pytest.raises(BadRequest, match=said):
        runner_of(folder)


def test_shards_are_loaded_in_parallel_with_progress(
    small_model: Callable[[str], Path], tmp_path: Path
) -> None:
    calls: list[tuple[str, int, int]] = []
    folder = small_model("qwen2")
    assert len(list(folder.glob("*.safetensors"))) > 1
    build_runner(folder, SETTINGS, progress=lambda *call: calls.append(call))
    assert [done for _, done, _ in calls] == list(range(1, calls[-1][2] + 1)), "each tensor once, in order"
    before = torch.get_num_threads()
    build_runner(folder, SETTINGS)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("variant", "older"),
    [
        ("qwen2-late-window", {"max_window_layers": 1}),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 2}),
        ("smollm3-windows", {}),
        (
            "gemma3",
            {
                "sliding_window_pattern": 3,
                "rope_parameters": None,
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
    ],
)
def test_an_older_spelling_without_a_list_of_layers_is_the_same(
    variant: str, older: dict[str, Any], small_model: Callable[[str], Path]
) -> None:
    config = read_config(small_model(variant))
    spelt = {key: value for key, value in config.items() if key != "layer_types"} | older
    assert DecoderConfig.read(spelt) == DecoderConfig.read(config)
