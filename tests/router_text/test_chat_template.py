"""Chat templates as `transformers` renders them, and what they must not do."""

from __future__ import annotations

import pytest

from fleet.errors import BadRequest
from router.text.template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    "plain": (
        "{{ bos_token }}{% for m in messages %}\n"
        "  {% if m.role == 'user' %}\n"
        "[{{ m['content'] | trim }}]{% else %}({{ m.content }}){{ eos_token }}{% endif %}\n"
        "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    ),
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "loop controls": (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    ),
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
}
MESSAGES = [{"role": "user", "content": " <b>é & 'q'</b> "}, {"role": "assistant", "content": "ok"}]


def template(source: str, most: int = 10_000) -> ChatTemplate:
    return ChatTemplate(source, SPECIAL, most_characters=most)


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        conversations=[MESSAGES],
        chat_template=TEMPLATES[name],
        add_generation_prompt=True,
        **SPECIAL,
    )
    assert template(TEMPLATES[name]).render(MESSAGES) == rendered[0]


def test_what_the_template_raises_is_told() -> None:
    with pytest.raises(BadRequest, match="roles must alternate") as caught:
        template("{{ raise_exception('roles must alternate') }}").render(MESSAGES)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content.x }}",
        "{{ 1 / 0 }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for a in range(10**9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' | nothing_of_the_kind }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_a_bad_request(source: str) -> None:
    try:
        made = template(source)
    except ValueError:
        return
    with pytest.raises(BadRequest, match="chat template"):
        made.render(MESSAGES)


def test_output_is_bounded() -> None:
    with pytest.raises(BadRequest, match="longer than 100 characters"):
        template("{% for a in range(99999) %}xxxxxxxxxx{% endfor %}", 100).render(MESSAGES)


def test_a_broken_template_says_where() -> None:
    with pytest.raises(ValueError, match="line 2"):
        template("fine\n{% if %}")


def test_strftime_now() -> None:
    assert template("{{ strftime_now('%Y') }}").render(MESSAGES).isdigit()
