"""A model's text side: folders, end tokens, threads, limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fleet.errors import BadRequest
from router.text.detokenize import Detokenizer
from router.text.tokenizer import ModelText, TextSettings


@pytest.fixture
def text(trained_json: str) -> Iterator[ModelText]:
    made = ModelText(trained_json, context=200, settings=TextSettings(threads=2, inline_characters=64))
    yield made
    made.close()


def write_folder(folder: Path, tokenizer: str, **files: object) -> None:
    (folder / "tokenizer.json").write_text(tokenizer)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


def test_end_tokens_come_from_all_files(tmp_path: Path, trained_json: str) -> None:
    write_folder(
        tmp_path,
        trained_json,
        config={"eos_token_id": 7, "max_position_embeddings": 128},
        generation_config={"eos_token_id": [9, 7]},
        tokenizer_config={"eos_token": {"content": "<|im_end|>"}, "chat_template": "{{ eos_token }}"},
    )
    text = ModelText.load(tmp_path)
    assert set(text.end_tokens) == {7, 9, 1}
    assert text.context == 128
    assert asyncio.run(text.render([{"role": "user", "content": ""}])) == "<|im_end|>"
    text.close()


def test_a_template_file_comes_before_the_one_in_the_config(tmp_path: Path, trained_json: str) -> None:
    write_folder(
        tmp_path,
        trained_json,
        config={"max_position_embeddings": 8},
        tokenizer_config={"chat_template": [{"name": "default", "template": "a"}]},
    )
    text = ModelText.load(tmp_path)
    assert text.template is not None
    assert text.template.render([]) == "a"
    text.close()
    (tmp_path / "chat_template.jinja").write_text("b")
    text = ModelText.load(tmp_path)
    assert text.template is not None
    assert text.template.render([]) == "b"
    text.close()


def test_no_template_is_a_bad_request(text: ModelText) -> None:
    with pytest.raises(BadRequest, match="no chat template"):
        asyncio.run(text.render([{"role": "user", "content": "x"}]))


def test_an_unknown_decoder_is_named(trained_json: str) -> None:
    odd = json.loads(trained_json)
    odd["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(ValueError, match="WordPiece"):
        ModelText(json.dumps(odd))


def test_byte_fallback_pieces() -> None:
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {"<unk>": 0, "<0xC3>": 1, "<0xA9>": 2, "▁hi": 3, "▁": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    text = ModelText(tokenizer.to_str())
    detokenizer = Detokenizer(text.vocabulary, prompt=[3])
    assert [detokenizer.feed(token) for token in (3, 1, 2, 4)] == [" hi", "", "é", " "]
    assert text.decode([3, 3, 1, 2, 4]) == "hi" + " hi" + "é" + " "
    text.close()


def test_a_text_that_cannot_fit_is_refused_unread(text: ModelText) -> None:
    with pytest.raises(BadRequest, match="context") as caught:
        asyncio.run(text.encode("x" * (text.most_characters + 1), add_special=False))
    assert caught.value.code == "context_length_exceeded"


def test_lone_surrogates_are_a_bad_request(text: ModelText) -> None:
    with pytest.raises(BadRequest, match="Unicode"):
        asyncio.run(text.encode("a\ud800", add_special=False))


def test_many_threads_and_tasks_agree_with_one(text: ModelText) -> None:
    texts = [f"The quick brown fox {n} " * (1 + n % 9) for n in range(200)]
    serial = [text._encode(item, False) for item in texts]
    decoded = [text.decode(item) for item in serial]

    async def together() -> list[list[int]]:
        return await asyncio.gather(*(text.encode(item, add_special=False) for item in texts))

    assert asyncio.run(together()) == serial
    with ThreadPoolExecutor(50) as pool:
        assert list(pool.map(lambda item: text._encode(item, False), texts)) == serial
        assert list(pool.map(text.decode, serial)) == decoded == texts


@pytest.mark.model
def test_the_demo_model_speaks_as_transformers_does() -> None:
    from transformers import AutoTokenizer

    from fleet.model_files import resolve

    folder = resolve("smollm2").folder
    text, other = ModelText.load(folder), AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "Grüße 😀 aus 東京!"}, {"role": "assistant", "content": "ok"}]
    rendered = asyncio.run(text.render(messages))
    assert rendered == other.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens = asyncio.run(text.encode(rendered, add_special=False))
    assert tokens == other.encode(rendered, add_special_tokens=False)
    detokenizer = Detokenizer(text.vocabulary, skip_special=False)
    assert "".join(map(detokenizer.feed, tokens)) + detokenizer.flush() == rendered
    assert other.eos_token_id in text.end_tokens
    text.close()


def test_the_byte_tokenizer_of_models_without_weights() -> None:
    text = ModelText.of_bytes()
    tokens = asyncio.run(text.encode("Hi é", add_special=True))
    assert bytes(tokens).decode() == "Hi é"
    rendered = asyncio.run(text.render([{"role": "user", "content": "Hi"}]))
    assert asyncio.run(text.encode(rendered, add_special=False))[0] == 256
    assert text.end_tokens == (257,)
    text.close()


def test_a_long_text_does_not_hold_up_the_loop(trained_json: str) -> None:
    text = ModelText(trained_json, settings=TextSettings(inline_characters=64))

    async def main() -> int:
        encoding = asyncio.create_task(text.encode("The quick brown fox " * 20_000, add_special=False))
        turns = 0
        while not encoding.done():
            await asyncio.sleep(0)
            turns += 1
        assert len(encoding.result()) > 20_000
        return turns

    # On the loop it would be done within its first turn.
    assert asyncio.run(main()) > 10
    text.close()
