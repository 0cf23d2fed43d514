"""A GGUF file becomes a folder that `transformers` reads as the model it was made from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file

from fleet.errors import BadRequest
from fleet.gguf_folder import convert

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOKENS = ["<|end|>", "<|user|>", *"abcdefgh", "Ġ", *"0123456789", "ab", "Ġa", "cd", "abcd"]
MERGES = ["a b", "Ġ a", "c d", "ab cd"]


def random_model(family: str, **changes: Any) -> Any:
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for values in model.parameters():
            values.normal_(0.5, 0.3)
    return model


def write_gguf(
    path: Path,
    model: Any,
    architecture: str,
    kinds: Callable[[str], gguf.GGMLQuantizationType] = lambda name: gguf.GGMLQuantizationType.F32,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    tokenizer: str = "gpt2",
) -> None:
    """The file as other converters write it: rotary rows of the llama architecture interleaved."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 4] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    extra(writer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name and architecture == "llama":
                halves = values.reshape(heads, 2, -1, *values.shape[1:])
                values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        target = NAMES.get(name)
        if target is None:
            _, _, layer, rest = name.split(".", 3)
            part, _, kind = rest.rpartition(".")
            target = f"blk.{layer}.{NAMES[part]}.{kind}"
        kind = kinds(target)
        writer.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    made.mkdir()
    return made


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])).logits
    return found


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ("Qwen2", {"rms_norm_eps": 1e-5}),
        ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    ],
)
def test_the_folder_is_the_same_model(
    family: str, changes: dict[str, Any], tmp_path: Path, folder: Path
) -> None:
    model = random_model(family, **changes)
    write_gguf(tmp_path / "m.gguf", model, family.lower())
    convert(tmp_path / "m.gguf", folder)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert type(loaded) is type(model)
    torch.testing.assert_close(logits(loaded), logits(model), atol=0, rtol=0)
    for key in ("rms_norm_eps", "rope_parameters", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(loaded.config, key) == getattr(model.config, key)


def test_quantised_tensors_become_their_values_and_half_floats_stay(tmp_path: Path, folder: Path) -> None:
    types = gguf.GGMLQuantizationType
    model = random_model("Llama")

    def kinds(name: str) -> gguf.GGMLQuantizationType:
        if "norm" in name:
            return types.F32
        chosen = {"attn_q": types.Q8_0, "attn_k": types.F16, "ffn_up": types.BF16}
        return next((kind for part, kind in chosen.items() if part in name), types.Q4_1)

    write_gguf(tmp_path / "m.gguf", model, "llama", kinds)
    calls: list[tuple[str, int, int]] = []
    convert(tmp_path / "m.gguf", folder, lambda *call: calls.append(call))
    state, weights = model.state_dict(), load_file(folder / "model.safetensors")
    at = "model.layers.1."
    half = weights[at + "self_attn.k_proj.weight"]
    torch.testing.assert_close(half, state[at + "self_attn.k_proj.weight"].half(), atol=0, rtol=0)
    brain = weights[at + "mlp.up_proj.weight"]
    torch.testing.assert_close(brain, state[at + "mlp.up_proj.weight"].bfloat16(), atol=0, rtol=0)
    down = state[at + "mlp.down_proj.weight"].numpy()
    exact = gguf.quants.dequantize(gguf.quants.quantize(down, types.Q4_1), types.Q4_1)
    assert weights[at + "mlp.down_proj.weight"].dtype == torch.float32
    assert np.array_equal(weights[at + "mlp.down_proj.weight"].numpy(), exact)
    torch.testing.assert_close(
        weights[at + "self_attn.q_proj.weight"], state[at + "self_attn.q_proj.weight"], atol=0.01, rtol=0.01
    )
    assert calls[-1] == ("convert", len(state), len(state))


def test_llama3_scaling_is_found_from_its_factors(tmp_path: Path, folder: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = random_model("Llama", rope_parameters=rope, head_dim=32)
    plain = 1.0 / 5e5 ** (torch.arange(0, 32, 2).float() / 32)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_key_length(32)
        writer.add_tensor("rope_freqs.weight", factors)

    write_gguf(tmp_path / "m.gguf", model, "llama", extra=extra)
    convert(tmp_path / "m.gguf", folder)
    assert json.loads((folder / "config.json").read_text())["rope_parameters"] == rope
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.testing.assert_close(logits(loaded), logits(model), atol=0, rtol=0)


def test_tokenizer_merges_splits_digits_and_knows_its_special_tokens(tmp_path: Path, folder: Path) -> None:
    write_gguf(tmp_path / "m.gguf", random_model("Llama"), "llama")
    convert(tmp_path / "m.gguf", folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "abcd a<|user|>12<|end|>"
    encoded = tokenizer.encode(text)
    assert encoded.tokens == ["abcd", "Ġa", "<|user|>", "1", "2", "<|end|>"]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert tokenizer.decode(encoded.ids) == "abcd a<|user|>12"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["eos_token"], config["bos_token"]) == ("<|end|>", "<|user|>")
    assert config["chat_template"] == "{{ messages[0]['content'] }}"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0]


def test_a_first_token_is_put_before_a_text_where_the_file_says_so(tmp_path: Path, folder: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_add_bos_token(True)
        writer.add_eot_token_id(1)

    write_gguf(tmp_path / "m.gguf", random_model("Llama"), "llama", extra=extra)
    convert(tmp_path / "m.gguf", folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ab").tokens == ["<|user|>", "ab"]
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == ["ab"]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 1]


def test_what_is_not_supported_is_named(tmp_path: Path, folder: Path) -> None:
    model = random_model("Llama")
    write_gguf(tmp_path / "a.gguf", model, "gemma2")
    with pytest.raises(BadRequest, match="architecture 'gemma2'; supported: llama, qwen2"):
        convert(tmp_path / "a.gguf", folder)
    write_gguf(tmp_path / "b.gguf", model, "llama", tokenizer="llama")
    with pytest.raises(BadRequest, match="tokenizer 'llama'"):
        convert(tmp_path / "b.gguf", folder)
    odd = np.zeros(4, dtype=np.float32)
    write_gguf(
        tmp_path / "c.gguf", model, "llama", extra=lambda w: w.add_tensor("blk.0.attn_q_norm.weight", odd)
    )
    with pytest.raises(BadRequest, match=r"tensor blk\.0\.attn_q_norm\.weight"):
        convert(tmp_path / "c.gguf", folder)
    write_gguf(tmp_path / "d.gguf", model, "llama", extra=lambda w: w.add_expert_count(8))
    with pytest.raises(BadRequest, match="mixture of experts"):
        convert(tmp_path / "d.gguf", folder)
    write_gguf(
        tmp_path / "e.gguf",
        model,
        "llama",
        extra=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
    )
    with pytest.raises(BadRequest, match="scaling 'yarn'"):
        convert(tmp_path / "e.gguf", folder)
    (tmp_path / "f.gguf").write_bytes(b"<html>not a model</html>" * 10)
    with pytest.raises(BadRequest, match="not a readable GGUF"):
        convert(tmp_path / "f.gguf", folder)
