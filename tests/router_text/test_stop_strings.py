"""Stop strings against cutting the full text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.stop import StopStrings

AB = st.text("ab", max_size=40)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


def cut(text: str, stops: list[str]) -> str:
    """Up to the start of the stop string that is complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))]
    return text


def pieces(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(AB, STOPS, st.data())
def test_joined_deltas_are_the_cut_text(text: str, stops: list[str], data: st.DataObject) -> None:
    matcher = StopStrings(stops)
    shown = "".join(matcher.feed(piece) for piece in pieces(text, data)) + matcher.flush()
    assert shown == cut(text, stops)
    assert (matcher.matched is not None) == (shown != text or any(stop in text for stop in stops))


@given(AB, STOPS)
def test_only_the_longest_possible_beginning_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopStrings(stops)
    shown = ""
    for count, char in enumerate(text, 1):
        shown += matcher.feed(char)
        if matcher.matched:
            break
        proper = {stop[:n] for stop in stops for n in range(1, len(stop))}
        held = max((n for n in range(1, count + 1) if text[count - n : count] in proper), default=0)
        assert len(shown) == count - held


def test_a_stop_string_over_many_tokens_shows_nothing_of_itself() -> None:
    matcher = StopStrings(["UVWXYZ"])
    assert [matcher.feed(part) for part in ("so UV", "W", "X", "YZ tail")] == ["so ", "", "", ""]
    assert matcher.matched == "UVWXYZ"
    assert matcher.flush() == ""


def test_a_stop_string_inside_one_token() -> None:
    matcher = StopStrings(["END"])
    assert matcher.feed("fooENDbar") == "foo"


def test_a_stop_string_of_two_words() -> None:
    matcher = StopStrings(["two words"])
    assert matcher.feed("say two") + matcher.feed(" words") + matcher.feed(" more") == "say "


def test_the_beginning_of_a_stop_string_at_the_end_is_text() -> None:
    matcher = StopStrings(["<|marker|>"])
    assert matcher.feed("ab<|ma") == "ab"
    assert matcher.flush() == "<|ma"


def test_text_like_no_stop_string_is_not_delayed() -> None:
    matcher = StopStrings(["<|long_marker|>"])
    assert [matcher.feed(part) for part in ("plain", " text", " <b")] == ["plain", " text", " <b"]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings([""])
