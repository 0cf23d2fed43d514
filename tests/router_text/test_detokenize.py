"""Incremental detokenization against decoding everything at once."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.text.detokenize import Detokenizer, Vocabulary
from router.text.tokenizer import ModelText

BYTE = st.integers(0, 255)
TEXT = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("a é中😀👩\u200d👩\u0301"))
)
VOCABULARY = Vocabulary((*(bytes([n]) for n in range(256)), b"<end>"), frozenset({256}))


def deltas(vocabulary: Vocabulary, tokens: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(vocabulary, prompt=prompt or [])
    return [*(detokenizer.feed(token) for token in tokens), detokenizer.flush()]


@given(TEXT)
def test_whole_text_comes_back_without_replacement(text: str) -> None:
    parts = deltas(VOCABULARY, list(text.encode()))
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text


@given(st.lists(BYTE, max_size=60))
def test_any_bytes_equal_the_full_decode(tokens: list[int]) -> None:
    assert "".join(deltas(VOCABULARY, tokens)) == bytes(tokens).decode("utf-8", "replace")


@given(st.lists(BYTE, max_size=60))
def test_at_most_three_bytes_wait(tokens: list[int]) -> None:
    detokenizer = Detokenizer(VOCABULARY)
    shown = ""
    for count, token in enumerate(tokens, 1):
        shown += detokenizer.feed(token)
        assert len(bytes(tokens[:count]).decode("utf-8", "replace")) - len(shown) <= 3
        for waiting in range(4):
            if bytes(tokens[: count - waiting]).decode("utf-8", "replace") == shown:
                break
        else:
            pytest.fail(f"more than three bytes wait after {tokens[:count]}")


@given(TEXT, st.data())
def test_prompt_that_ends_inside_a_character_is_not_repeated(text: str, data: st.DataObject) -> None:
    whole = list((text + "😀中é").encode())
    cut = data.draw(st.integers(0, len(whole)))
    prompt, rest = whole[:cut], whole[cut:]
    finished = bytes(prompt).decode("utf-8", "ignore")
    assert finished + "".join(deltas(VOCABULARY, rest, prompt)) == bytes(whole).decode()


def test_an_endless_row_of_broken_bytes_streams() -> None:
    parts = deltas(VOCABULARY, [0xF0] * 4000)
    longest = 0
    silent = 0
    for part in parts:
        silent = 0 if part else silent + 1
        longest = max(longest, silent)
    assert longest <= 4
    assert "".join(parts) == "\ufffd" * 4000


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    assert deltas(VOCABULARY, [104, 256, 105]) == ["h", "", "i", ""]
    detokenizer = Detokenizer(VOCABULARY, skip_special=False)
    assert "".join(detokenizer.feed(token) for token in (104, 256, 105)) == "h<end>i"


def test_a_token_outside_the_vocabulary_is_no_text() -> None:
    assert deltas(VOCABULARY, [104, 5000, -1, 105]) == ["h", "", "", "i", ""]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tokens=st.lists(st.integers(0, 599), max_size=80))
def test_real_tokenizer_any_tokens(trained_json: str, tokens: list[int]) -> None:
    text = shared(trained_json)
    tokens = [token for token in tokens if token < len(text.vocabulary)]
    assert "".join(deltas(text.vocabulary, tokens)) == text.decode(tokens)


@given(prompt=TEXT, answer=TEXT)
def test_real_tokenizer_prompt_and_answer(trained_json: str, prompt: str, answer: str) -> None:
    text = shared(trained_json)
    before, after = text._encode(prompt, False), text._encode(answer, False)
    joined = "".join(deltas(text.vocabulary, after, before))
    assert text.decode(before) + joined == text.decode(before + after)


_SHARED: dict[str, ModelText] = {}


def shared(trained_json: str) -> ModelText:
    if trained_json not in _SHARED:
        _SHARED[trained_json] = ModelText(trained_json)
    return _SHARED[trained_json]
