"""Turns a GGUF file into a Hugging Face folder that this engine and `transformers` both load.

Nothing is lost on the way: tensors stored as F16 or BF16 stay so, quantised ones become the F32 values
they stand for. Shapes are stored reversed in GGUF. For the llama architecture the rows of Q and K were
reordered for interleaved rotary pairs; here they are put back. Format: the GGUF specification of ggml.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from fleet.errors import BadRequest

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total); bytes, or tensors while converting."""

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_OF = {"qwen3": {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}}
"""What layers of one architecture have beside those."""
_ROPE_FACTORS = "rope_freqs.weight"
"""Llama 3 scaling as one factor a frequency; goes to the config, not to the weights."""

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
"""Token types of GGUF."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _split(pattern: str) -> list[dict[str, Any]]:
    """Pre-tokenizer that cuts by its own pattern and maps bytes afterwards."""
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {**_BYTE_LEVEL, "use_regex": False},
    ]


_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_BYTE_LEVEL],
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    "qwen2": _split(_LLAMA3_SPLIT.replace("{1,3}", "")),
    "llama-bpe": _split(_LLAMA3_SPLIT),
}
"""By `tokenizer.ggml.pre`: how text is cut before byte pairs are merged."""


def convert(source: Path, folder: Path, progress: Progress | None = None) -> None:
    """Writes config, weights and tokenizer files into `folder`, which must exist.

    Raises BadRequest that names the architecture, tensor or tokenizer it does not know.
    """
    try:
        reader = GGUFReader(source)
    except (ValueError, IndexError) as error:
        raise BadRequest(f"{source} is not a readable GGUF file: {error}") from error
    meta = {name: field.contents() for name, field in reader.fields.items()}
    architecture = str(meta.get("general.architecture"))
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise BadRequest(f"{source.name} holds architecture {architecture!r}; supported: {known}")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(source.name, meta, architecture, tensors)
    tokenizer, tokenizer_config = _tokenizer(source.name, meta, config)
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer.json", tokenizer)
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "generation_config.json", _generation(meta))
    _write_weights(folder / "model.safetensors", source.name, config, tensors, progress)


def _need(file: str, meta: dict[str, Any], key: str) -> Any:
    if key not in meta:
        raise BadRequest(f"{file} has no field {key}")
    return meta[key]


def _config(file: str, meta: dict[str, Any], architecture: str, tensors: dict[str, Any]) -> dict[str, Any]:
    def need(key: str) -> Any:
        return _need(file, meta, f"{architecture}.{key}")

    if meta.get(f"{architecture}.expert_count", 0):
        raise BadRequest(
            f"{file} is a mixture of experts; supported: dense models. Its Hugging Face folder may work"
        )
    if "token_embd.weight" not in tensors:
        raise BadRequest(f"{file} has no tensor token_embd.weight")
    heads, hidden = int(need("attention.head_count")), int(need("embedding_length"))
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(need("feed_forward_length")),
        "num_hidden_layers": int(need("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta.get(f"{architecture}.attention.head_count_kv", heads)),
        "head_dim": int(meta.get(f"{architecture}.attention.key_length", hidden // heads)),
        "max_position_embeddings": int(need("context_length")),
        "rms_norm_eps": float(str(np.float32(need("attention.layer_norm_rms_epsilon")))),
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": "float32",
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }
    if architecture == "llama":
        config |= {"attention_bias": False, "mlp_bias": False}
    theta = float(meta.get(f"{architecture}.rope.freq_base", 10000.0))
    scaling = str(meta.get(f"{architecture}.rope.scaling.type", "none"))
    if scaling != "none":
        raise BadRequest(f"{file} wants rotary scaling {scaling!r}; supported: none, llama3")
    rope: dict[str, Any] = {"rope_type": "default"}
    if _ROPE_FACTORS in tensors:
        rope = _llama3_scaling(file, np.asarray(tensors[_ROPE_FACTORS].data), theta)
        config["rope_scaling"] = rope
    # Both spellings: `transformers` 5 reads the second, everything older the first.
    return config | {"rope_theta": theta, "rope_parameters": {**rope, "rope_theta": theta}}


def _llama3_scaling(file: str, factors: np.ndarray[Any, Any], theta: float) -> dict[str, Any]:
    """The settings that give exactly these factors; GGUF keeps the factors alone."""
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    frequencies = theta ** -(np.arange(len(factors)) / len(factors))
    turns = original * frequencies / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(factors, expected, rtol=1e-3):
        raise BadRequest(f"{file}: {_ROPE_FACTORS} holds factors that are not those of Llama 3 scaling")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _tokenizer(
    file: str, meta: dict[str, Any], config: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE tokenizer."""
    kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise BadRequest(
            f"{file} has tokenizer {kind!r} with pre-tokenizer {pre!r}; supported: 'gpt2' with "
            f"{', '.join(_PRE_TOKENIZERS)}. The model's Hugging Face folder works as it is."
        )
    tokens: list[str] = _need(file, meta, "tokenizer.ggml.tokens")
    types: list[int] = meta.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    added = [
        {
            "id": index,
            "content": tokens[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, kind in enumerate(types)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    named = {
        f"{name}_token": tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in meta
    }
    bos = named.get("bos_token") if meta.get("tokenizer.ggml.add_bos_token") else None
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "post_processor": _begin_with(bos, tokens) if bos else None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in _need(file, meta, "tokenizer.ggml.merges")],
        },
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        **named,
    }
    if "tokenizer.chat_template" in meta:
        tokenizer_config["chat_template"] = meta["tokenizer.chat_template"]
    return tokenizer, tokenizer_config


def _begin_with(bos: str, tokens: list[str]) -> dict[str, Any]:
    """Post-processor that puts the first token before every text."""
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            first,
            {"Sequence": {"id": "A", "type_id": 0}},
            first,
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {bos: {"id": bos, "ids": [tokens.index(bos)], "tokens": [bos]}},
    }


def _generation(meta: dict[str, Any]) -> dict[str, Any]:
    """End tokens: of the text, and of a turn where the model has its own for that."""
    ends = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    unique = sorted({int(token) for token in ends if token is not None})
    return {"bos_token_id": meta.get("tokenizer.ggml.bos_token_id"), "eos_token_id": unique}


def _name(file: str, name: str, architecture: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    prefix, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    part, _, kind = rest.partition(".")
    known = _LAYER | _LAYER_OF.get(architecture, {})
    if prefix == "blk" and part in known and kind in ("weight", "bias"):
        return f"model.layers.{layer}.{known[part]}.{kind}"
    raise BadRequest(f"{file} has tensor {name}, which architecture {architecture!r} does not have")


def _write_weights(
    path: Path, file: str, config: dict[str, Any], tensors: dict[str, Any], progress: Progress | None
) -> None:
    """A safetensors file, tensor by tensor, so that no more than one is in memory."""
    architecture = config["model_type"]
    names = {name: _name(file, name, architecture) for name in tensors if name != _ROPE_FACTORS}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, target in names.items():
        kept = _KEPT.get(tensors[name].tensor_type, ("F32", "<u4"))
        shape = [int(size) for size in reversed(tensors[name].shape)]
        size = int(np.prod(shape)) * np.dtype(kept[1]).itemsize
        header[target] = {"dtype": kept[0], "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for done, values in enumerate(_values(names, config, tensors), start=1):
            out.write(values.tobytes())
            if progress:
                progress("convert", done, len(names))


_KEPT = {GGMLQuantizationType.F16: ("F16", "<u2"), GGMLQuantizationType.BF16: ("BF16", "<u2")}
"""Types that are stored as they are, by their bits."""


def _values(
    names: dict[str, str], config: dict[str, Any], tensors: dict[str, Any]
) -> Iterator[np.ndarray[Any, Any]]:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    permuted = config["model_type"] == "llama"
    for name, target in names.items():
        tensor = tensors[name]
        kept = _KEPT.get(tensor.tensor_type)
        values = tensor.data.view(kept[1]) if kept else dequantize(tensor.data, tensor.tensor_type)
        if permuted and ".q_proj." in target:
            values = _halves(values, heads)
        elif permuted and ".k_proj." in target:
            values = _halves(values, kv_heads)
        yield values


def _halves(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of each head from interleaved rotary pairs (0, d/2, 1, d/2 + 1, …) back to two halves."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
