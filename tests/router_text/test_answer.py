"""One answer's text: end tokens, stop strings, least tokens, log-probabilities."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleet.request import FinishReason, TokenLogprobs
from router.text.answer import Answer
from router.text.detokenize import Vocabulary

VOCABULARY = Vocabulary((*(bytes([n]) for n in range(256)), b"<end>"), frozenset({256}))
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def text_of(answer: Answer, tokens: list[int], finish: FinishReason) -> str:
    shown = "".join(answer.feed(token) for token in tokens)
    return shown + answer.end(finish)


def test_a_stop_token_that_ends_the_answer_is_no_text() -> None:
    assert text_of(Answer(VOCABULARY, end_tokens=[ord("!")]), list(b"hi!"), STOP) == "hi"


def test_a_stop_token_that_did_not_end_it_is_text() -> None:
    # With min_tokens an engine may draw one and go on.
    assert text_of(Answer(VOCABULARY, end_tokens=[ord("!")]), list(b"h!i!"), STOP) == "h!i"
    assert text_of(Answer(VOCABULARY, end_tokens=[ord("!")]), list(b"hi!"), LENGTH) == "hi!"
    assert text_of(Answer(VOCABULARY, end_tokens=[ord("!")]), list(b"h!!"), STOP) == "h!"


def test_stop_strings_count_only_after_the_least_tokens() -> None:
    answer = Answer(VOCABULARY, stops=["b"], min_tokens=4)
    assert text_of(answer, list(b"abcabc"), STOP) == "abca"
    assert answer.matched


def test_all_drawn_tokens_are_counted() -> None:
    answer = Answer(VOCABULARY, end_tokens=[256])
    text_of(answer, [*b"hi", 256], STOP)
    assert answer.tokens == 3


def test_a_character_cut_off_by_the_end_is_replaced() -> None:
    assert text_of(Answer(VOCABULARY), list("é".encode())[:1], LENGTH) == "\ufffd"


def test_what_a_stop_string_held_back_is_shown_once_at_the_end() -> None:
    assert text_of(Answer(VOCABULARY, stops=["xyz"]), list(b"axy"), LENGTH) == "axy"


@given(st.text(max_size=30))
def test_bytes_of_the_logged_tokens_are_the_text(text: str) -> None:
    answer = Answer(VOCABULARY)
    tokens = list(text.encode())
    shown = "".join(answer.feed(token, TokenLogprobs(-1.0)) for token in tokens) + answer.end(LENGTH)
    assert b"".join(VOCABULARY.piece(item.token) for item in answer.logged).decode() == shown == text
    assert [item.offset for item in answer.logged] == sorted(item.offset for item in answer.logged)
