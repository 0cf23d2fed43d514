"""Chat templates that come with a request, where a setting allows them: what they see and what holds them."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from router.text.tokenizer import ModelText, TextSettings

TURNS = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
R = "range(100000)"
DOUBLING = (
    "{% set n = namespace(x='aaaaaaaaaaaaaaaa') %}"
    "{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
)

HOSTILE = {
    "no template": "{% for %}",
    "loops": f"{{% for a in {R} %}}{{% for b in {R} %}}{{% endfor %}}{{% endfor %}}",
    "strings that double": DOUBLING,
    "a wide string": "{{ 'x'|center(3000000000) }}",
    "a wide number": "{{ '%03000000000d' % 1 }}",
    "a long prompt": f"{{% for a in {R} %}}{{{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' }}}}{{% endfor %}}",
    "the ways out": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "the globals": "{{ raise_exception.__globals__['os'].system('true') }}",
    "an attribute by filter": "{{ ''|attr('__class__')|attr('__mro__') }}",
    "a format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "an include": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os }}",
    "nested brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "a change of what it sees": "{{ messages.append(1) }}",
    "nothing at all": "{% if false %}{% endif %}",
    "its own refusal": "{{ raise_exception('not with me') }}",
}


@pytest.fixture
def impatient(tokenizer_json: str) -> ModelText:
    return ModelText(
        tokenizer_json, end_tokens=(1,), context=256, chat_template="{{ messages[0].content }}",
        special_tokens={"eos_token": "<|im_end|>"},
        settings=TextSettings(threads=2, template_seconds=0.5),
    )  # fmt: skip


def test_it_sees_what_the_models_own_would(serve: Any, says: Any, impatient: ModelText) -> None:
    async def main() -> None:
        async with serve(says("ok"), model_text=impatient, client_templates=True) as site:
            answer = await site.chat(
                chat_template=TURNS + "{{ eos_token }}{{ enable_thinking }}{{ add_generation_prompt }}",
                chat_template_kwargs={"enable_thinking": 7},
                messages=[{"role": "system", "content": "S é😀"}, {"role": "user", "content": "A"}],
            )
            assert answer.status_code == 200, answer.text
            seen = impatient.decode(site.spine.runs[0].request.prompt, skip_special=False)
            assert seen == "[system] S é😀 [user] A <|im_end|>7True"
            # Without one, or an empty one, the model's own.
            for more in ({}, {"chat_template": None}, {"chat_template": ""}):
                assert (await site.chat(**more)).status_code == 200
                assert impatient.decode(site.spine.runs[-1].request.prompt) == "hi"

    asyncio.run(main())


def test_whatever_it_does_is_refused_in_time(serve: Any, says: Any, impatient: ModelText) -> None:
    async def main() -> None:
        async with serve(says("ok"), model_text=impatient, client_templates=True) as site:

            async def refused(kind: str, source: str) -> None:
                answer = await site.client.post(
                    "/v1/chat/completions",
                    json={"model": "tiny/model-1", "messages": [{"role": "user", "content": "hi"}],
                          "chat_template": source},
                    timeout=120,
                )  # fmt: skip
                assert answer.status_code == 400, (kind, answer.text)
                assert answer.json()["error"]["param"] == "chat_template", kind
                assert "root:" not in answer.text

            looking = asyncio.create_task(asyncio.wait_for(_until_done(site), 300))
            await asyncio.gather(*(refused(kind, source) for kind, source in HOSTILE.items()))
            looking.cancel()
            assert not site.spine.runs
            assert (await site.chat(chat_template=TURNS)).status_code == 200

    asyncio.run(main())


async def _until_done(site: Any) -> None:
    """The ingress answers others meanwhile."""
    while True:
        assert (await site.client.get("/health")).status_code == 200
        await asyncio.sleep(0.01)


def test_it_sees_none_of_the_routers_secrets(monkeypatch: pytest.MonkeyPatch, impatient: ModelText) -> None:
    """Should the sandbox ever leak: there is nothing to be had in that process."""
    monkeypatch.setenv("PDFLEET_HTTP_SALT_SECRET", "very-secret")
    seen: list[dict[str, str]] = []
    start = asyncio.create_subprocess_exec

    async def watched(*command: str, env: dict[str, str], **rest: Any) -> Any:
        seen.append(env)
        return await start(*command, env=env, **rest)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", watched)
    assert asyncio.run(impatient.given.render("{{ messages }}", [])) == "[]"
    assert seen
    assert set(seen[0]) <= {"PYTHONPATH"} < set(os.environ) | {"PYTHONPATH"}


def test_a_long_one_is_refused_by_its_limit(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("ok"), client_templates=True, max_template_characters=10) as site:
            answer = await site.chat(chat_template="{{ messages }}")
            assert answer.status_code == 400
            assert "(setting http.max_template_characters)" in answer.json()["error"]["message"]

    asyncio.run(main())
