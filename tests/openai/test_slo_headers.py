"""Classes and deadlines that a request asks for by headers: who may ask for what, and what is told if not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fleet.api_keys import ApiKey, check_classes, digest
from fleet.errors import BadRequest
from fleet.objectives import CLASSES, Objectives
from router.openai.callers import Callers

KEYS = {"urgent": "interactive", "plain": "", "slow": "batch", "operator": ""}
OWN = {**CLASSES, "voice": Objectives(ttft_ms=300, itl_ms=60, priority=2)}


def entry(name: str, **more: Any) -> ApiKey:
    given = {"admin": name == "operator", **more}
    return ApiKey(sha256=digest(name), tenant=f"tenant-{name}", slo_class=KEYS[name], **given)


def callers(*, default: str = "standard", keys: bool = True) -> Callers:
    return Callers([entry(name, weight=2.0) for name in KEYS] if keys else (), "s", OWN, default)


def asked(of: Callers, key: str, **headers: str) -> Any:
    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return of.asked(of.caller(f"Bearer {key}".encode()), [(b"accept", b"*/*"), *given], 600.0)


def test_the_class_is_the_keys_the_default_or_what_the_header_says() -> None:
    of = callers()
    assert [asked(of, key).terms.slo_class for key in KEYS] == [
        "interactive", "standard", "batch", "standard",
    ]  # fmt: skip
    terms = asked(of, "urgent", x_slo_class="batch").terms
    assert (terms.slo_class, terms.objectives, terms.tenant, terms.weight) == (
        "batch", CLASSES["batch"], "tenant-urgent", 2.0,
    )  # fmt: skip
    assert asked(callers(default="batch"), "plain").terms.slo_class == "batch"
    anybody = callers(keys=False)
    assert asked(anybody, "").terms.slo_class == "standard"
    assert asked(anybody, "", x_slo_class="voice").terms.objectives.priority == 2


@pytest.mark.parametrize(
    ("key", "headers", "says"),
    [
        ("plain", {"x_slo_class": "gold"}, "no class 'gold'; there are: interactive, standard, batch, voice"),
        ("plain", {"x_slo_class": ""}, "no class ''"),
        ("plain", {"x_slo_class": "x" * 9999}, "there are: interactive"),
        ("slow", {"x_slo_class": "interactive"}, "key has the class batch; interactive is of a higher"),
        ("urgent", {"x_slo_class": "voice"}, "of a higher priority"),
        ("urgent", {"x_slo_ttft_ms": "2001"}, "from 1 to 2000 .that of the class interactive"),
        ("urgent", {"x_slo_ttft_ms": "0"}, "from 1 to 2000"),
        ("urgent", {"x_slo_ttft_ms": "nan"}, "from 1 to 2000"),
        ("urgent", {"x_slo_ttft_ms": "soon"}, "from 1 to 2000"),
        ("urgent", {"x_slo_ttft_ms": "1_000"}, "from 1 to 2000"),
        ("urgent", {"x_deadline_ms": "600001"}, "from 1 to 600000 .setting http.deadline_s"),
        ("urgent", {"x_deadline_ms": "-5"}, "x-deadline-ms must be a number of ms"),
        ("urgent", {"x_deadline_ms": "inf"}, "x-deadline-ms must be"),
        ("urgent", {"x_session_id": ""}, "names of 1 to 128 visible"),
        ("urgent", {"x_session_id": "a b"}, "names of 1 to 128 visible"),
        ("urgent", {"x_session_id": "x" * 129}, "names of 1 to 128 visible"),
        ("urgent", {"x_session_id": "ü"}, "names of 1 to 128 visible"),
        ("urgent", {"x_pin_workers": "d1"}, "only an operator's key"),
        ("operator", {"x_pin_workers": ""}, "names of 1 to 128 visible"),
        ("operator", {"x_pin_workers": "d1,,d2"}, "names of 1 to 128 visible"),
        ("operator", {"x_pin_workers": ",".join("abcdefghi")}, "names 9 workers; at most 8"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_for_is_told(key: str, headers: dict[str, str], says: str) -> None:
    with pytest.raises(BadRequest, match=says) as refused:
        asked(callers(), key, **headers)
    assert refused.value.param == next(iter(headers)).replace("_", "-")
    assert len(refused.value.message) < 400


def test_a_header_that_is_given_twice_is_refused_whatever_it_says() -> None:
    of = callers()
    twice = [(b"x-deadline-ms", b"5000"), (b"x-slo-class", b"batch"), (b"x-slo-class", b"batch")]
    with pytest.raises(BadRequest, match="x-slo-class is given more than once"):
        of.asked(of.caller(b"Bearer urgent"), twice, 600.0)


def test_a_request_may_ask_for_more_than_its_class_promises() -> None:
    got = asked(callers(), "urgent", x_slo_ttft_ms="500", x_deadline_ms="20000")
    assert (got.terms.objectives.ttft_ms, got.terms.objectives.e2e_ms, got.deadline_s) == (500, 20_000, 20)
    assert got.terms.objectives.tpot_ms == CLASSES["interactive"].tpot_ms
    # By the class that the same request chose.
    assert (
        asked(callers(), "urgent", x_slo_class="batch", x_slo_ttft_ms="9000").terms.objectives.ttft_ms == 9000
    )


def test_a_key_of_a_class_that_is_not_there_is_an_error() -> None:
    wrong = ApiKey(sha256=digest("x"), tenant="acme", slo_class="gold")
    with pytest.raises(
        ValueError, match="a key of acme has the class gold; there are: interactive, standard"
    ):
        Callers([wrong])
    with pytest.raises(ValueError, match="gold"):
        check_classes([wrong], CLASSES)
    check_classes([wrong], ("gold",))


def test_over_http(serve: Any, says: Any) -> None:
    async def main() -> None:
        async with serve(says("ok"), keys=[entry(name) for name in KEYS]) as site:

            async def post(key: str, **headers: str) -> Any:
                given = {name.replace("_", "-"): value for name, value in headers.items()}
                body = {"model": "tiny/model-1", "prompt": "hi", "max_tokens": 3, "priority": 9}
                return await site.client.post(
                    "/v1/completions", json=body, headers={"authorization": f"Bearer {key}", **given}
                )

            assert (await post("urgent")).status_code == 200
            assert (await post("urgent", x_slo_class="batch", x_deadline_ms="5000")).status_code == 200
            refused = await post("slow", x_slo_class="interactive")
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "x-slo-class"
            assert (await post("nobody", x_slo_class="batch")).status_code == 401
            first, second = site.spine.runs
            assert (first.terms.slo_class, first.request.priority, first.request.deadline_s) == (
                "interactive", 1, 600.0,
            )  # fmt: skip
            assert (second.terms.slo_class, second.request.priority, second.request.deadline_s) == (
                "batch", -1, 5.0,
            )  # fmt: skip
            assert second.terms.tenant == "tenant-urgent"

    asyncio.run(main())


def test_a_request_names_its_session_and_an_operator_its_workers() -> None:
    terms = asked(callers(), "urgent", x_session_id="chat-17").terms
    assert (terms.session, terms.pins, terms.tenant) == ("chat-17", (), "tenant-urgent")
    assert asked(callers(), "urgent").terms.session == ""
    assert asked(callers(), "operator", x_pin_workers="d1, p-0").terms.pins == ("d1", "p-0")
    assert asked(callers(keys=False), "", x_pin_workers="d1").terms.pins == ("d1",), "no keys, no secrets"
