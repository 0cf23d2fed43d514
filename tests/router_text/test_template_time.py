"""Chat templates that take too long, or make too much, end within their budget and hold up nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fleet.errors import BadRequest
from router.text.template import ChatTemplate, OutOfTime
from router.text.tokenizer import ModelText, TextSettings

MESSAGES = [{"role": "user", "content": "hi"}]
R = "range(100000)"

SLOW = {
    "loops": f"{{% for a in {R} %}}{{% for b in {R} %}}{{% endfor %}}{{% endfor %}}",
    "tests of loops": f"{{% for a in {R} if {R}|sum < 0 %}}{{% endfor %}}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "calls": f"{{% macro f() %}}{{% for a in {R} %}}{{{{ caller() }}}}{{% endfor %}}{{% endmacro %}}"
    f"{{% call f() %}}{{% for b in {R} %}}{{% endfor %}}{{% endcall %}}",
    "recursion": "{% for a in [[[]]] recursive %}{{ loop([a, a, a]) }}{% endfor %}",
}
HUGE = {
    "text": "{{ 'x' * 10000000000 }}",
    "list": f"{{{{ (({R}|list) * 1000000)|length }}}}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "range": "{{ range(10000000000)|list|length }}",
}


@pytest.mark.parametrize("kind", SLOW)
def test_slow_templates_are_ended(kind: str) -> None:
    template = ChatTemplate(SLOW[kind], {}, most_characters=1 << 20)
    began = time.monotonic()
    with pytest.raises((OutOfTime, BadRequest)):  # the recursion may meet Python's own limit first
        template.render(MESSAGES, limit_s=0.3)
    assert time.monotonic() - began < 60  # not the hours it would take


@pytest.mark.parametrize("kind", HUGE)
def test_huge_values_are_not_made(kind: str) -> None:
    with pytest.raises(BadRequest):
        ChatTemplate(HUGE[kind], {}, most_characters=1 << 20).render(MESSAGES)


def test_what_templates_do_is_not_changed_by_looking_at_the_time() -> None:
    source = (
        "{% macro turn(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}"
        "{% for m in messages if m.role != 'tool' %}{{ loop.index }}/{{ loop.length }}{{ turn(m) }}"
        "{% else %}nothing{% endfor %}{{ '=' * 3 }}{{ 2 ** 3 }}"
    )
    template = ChatTemplate(source, {}, most_characters=1000)
    messages = [{"role": role, "content": role[0]} for role in ("user", "tool", "assistant")]
    assert template.render(messages) == "1/2<user>u2/2<assistant>a===8"
    assert template.render([]) == "nothing===8"


def test_variables_and_tools_reach_the_template() -> None:
    template = ChatTemplate(
        "{{ bos }}{{ enable_thinking }}{{ tools|length if tools }}{{ messages|length }}",
        {"bos": "<s>"},
        most_characters=100,
    )
    assert template.render(MESSAGES) == "<s>1"
    # The names that mean something here are not a client's to set.
    own = {"enable_thinking": False, "messages": [], "bos": "no"}
    assert template.render(MESSAGES, [{}, {}], own) == "<s>False21"


@pytest.fixture
def slow() -> Iterator[ModelText]:
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    text = ModelText(
        tokenizer.to_str(), chat_template=SLOW["loops"], settings=TextSettings(template_seconds=0.3)
    )
    yield text
    text.close()


def test_the_loop_turns_while_a_template_is_slow(slow: ModelText) -> None:
    async def main() -> None:
        rendering = asyncio.create_task(slow.render(MESSAGES))
        turns = 0
        while not rendering.done():
            await asyncio.sleep(0.01)
            turns += 1
        assert turns > 5
        with pytest.raises(BadRequest, match=r"setting text\.template_seconds"):
            await rendering

    asyncio.run(main())
