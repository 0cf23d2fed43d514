"""What the load generator makes of a run: texts, objectives, figures, the search for a rate, plots."""

from __future__ import annotations

import io
import json
import math
import random
import re
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from fleet.errors import BadRequest
from fleet.goodput import End, Outcome
from fleet.objectives import CLASSES, Objectives
from fleet.workload import Amount, Arrivals, Kind, Piece, Shape
from fleetctl.bench.page import find_page, run_page
from fleetctl.bench.plan import Plan, Source, parse_kind, parse_objectives
from fleetctl.bench.plots import Axis, Rule, Series, cdf, plot
from fleetctl.bench.prompts import COMMON, COUNT, Texts, Vocabulary, words_for
from fleetctl.bench.report import figures_of_trial, report, timeline
from fleetctl.bench.search import Search, SearchSettings, Trial, hopeless_after, wilson
from fleetctl.bench.view import figures
from fleetctl.bench.words import Failure, Record, end_of_error, end_of_status

# Texts.


def test_a_text_has_a_word_a_token_and_is_that_of_its_key() -> None:
    made = Texts(Vocabulary())
    text = made.piece(Piece("a", 300))
    assert len(text.split(" ")) == 301  # the first is empty: each word has its space before it
    assert made.piece(Piece("a", 20)) == " ".join(text.split(" ")[:21])
    assert made.piece(Piece("b", 300)) != text
    assert made.pieces([Piece("a", 3), Piece("b", 2)]) == made.piece(Piece("a", 3)) + made.piece(
        Piece("b", 2)
    )
    assert Texts(Vocabulary()).piece(Piece("a", 300)) == text


def test_words_of_several_tokens_are_fewer() -> None:
    made = Texts(Vocabulary(tokens_per_word=5.5))
    assert len(made.piece(Piece("a", 110)).split()) == 20
    assert len(made.piece(Piece("a", 1)).split()) == 1


def test_words_are_those_that_a_tokenizer_has_whole() -> None:
    def count(text: str) -> int:
        """Vocabulary of more than seven letters are two tokens."""
        return sum(1 + (len(word) > 7) for word in text.split())

    words = words_for(count)
    assert len(words) == COUNT
    assert max(map(len, words)) == 7
    with pytest.raises(ValueError, match="single tokens"):
        words_for(len)


def test_the_words_are_what_they_should_be() -> None:
    assert len(set(COMMON)) == len(COMMON) >= COUNT
    assert all(re.fullmatch("[a-z]+", word) for word in COMMON)


# Objectives and kinds as they are written.


def test_objectives_as_they_are_written() -> None:
    assert parse_objectives("ttft=2000,tpot=150") == ("", Objectives(ttft_ms=2000, tpot_ms=150))
    written = "voice:ttft=300, itl=60,itl_percentile=99,e2e-ms=9e3"
    want = Objectives(ttft_ms=300, itl_ms=60, itl_percentile=99, e2e_ms=9000)
    assert parse_objectives(written) == ("voice", want)


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=", "ttft=x", "ttft=nan", "what=3", "ttft=-1", "No!:ttft=3"]
)
def test_objectives_that_cannot_be(text: str) -> None:
    with pytest.raises(BadRequest):
        parse_objectives(text)


def test_kinds_as_they_are_written() -> None:
    usual = Kind(prefix_tokens=9, output=Amount("constant", 5))
    kind = parse_kind("class=batch share=0.3 prompt=lognormal:2000,0.5 turns=1..4 prefixes=4", usual)
    assert (kind.service_class, kind.share, kind.prefixes, kind.prefix_tokens) == ("batch", 0.3, 4, 9)
    assert kind.prompt == Amount("lognormal", 2000, 0.5)
    assert (kind.turns, kind.output) == (Amount("uniform", 1, 4), usual.output)


@pytest.mark.parametrize(
    "text", ["share", "share=x", "prompt=x", "class=A", "what=3", "share=-1", "prefixes=0"]
)
def test_kinds_that_cannot_be(text: str) -> None:
    with pytest.raises(BadRequest):
        parse_kind(text, Kind())


def test_statuses_and_errors_have_their_end() -> None:
    ends = {429: End.REJECTED, 400: End.INVALID, 404: End.INVALID, 408: End.TIMED_OUT, 500: End.FAILED}
    assert {status: end_of_status(status) for status in ends} == ends
    assert end_of_status(504) is End.TIMED_OUT
    assert end_of_error({"type": "x", "code": 429}) is End.REJECTED
    assert end_of_error({"code": "rate_limit_exceeded"}) is End.REJECTED
    assert end_of_error({}) is End.FAILED


# Reports.


def record(due_s: float, times: list[float], end: End = End.FINISHED, **more: Any) -> Record:
    ended_s = more.pop("ended_s", times[-1] if times else 1.0)
    one = Record(0, 0, more.pop("service_class", ""), due_s, 12, len(times))
    one.sent_s = due_s + more.pop("lag_s", 0.001)
    one.outcome = Outcome(end, ended_s, times)
    one.prompt_tokens, one.output_tokens = 20, len(times)
    for name, value in more.items():
        setattr(one, name, value)
    return one


PLAN = Plan(Source(arrivals=Arrivals.steady(1)), {"voice": Objectives(ttft_ms=100)}, Objectives(tpot_ms=200))


def told(records: list[Record], plan: Plan = PLAN, **more: Any) -> dict[str, Any]:
    given_ = {"sending_s": 10.0, "total_s": 12.0, "cpu_s": 1.2, "connections": 2, **more}
    said = report(plan, records, **given_)
    json.dumps(said, allow_nan=False)
    return said


def test_each_class_is_judged_by_its_rules() -> None:
    records = [
        record(1, [0.05, 0.15, 0.25], service_class="voice"),
        record(2, [0.15, 0.25, 0.35], service_class="voice"),
        record(3, [0.5, 0.7, 0.9, 1.1]),
        record(4, [0.5, 0.8, 1.1]),
        record(5, [], End.REJECTED, failure=Failure("http 429", "full\nhere")),
        record(6, [0.5], End.CANCELLED, ended_s=0.6),
        record(7, [], End.INVALID, failure=Failure("http 400", "x")),
    ]
    said = told(records)
    assert said["all"]["goodput"] == 0.2
    assert said["all"]["attainment"] == 0.4
    assert (said["all"]["attained"], said["all"]["missed"], said["all"]["uncounted"]) == (2, 3, 2)
    assert said["all"]["missed_by"] == {"rejected": 1, "tpot": 1, "ttft": 1}
    assert said["classes"]["voice"]["attainment"] == 0.5
    assert said["classes"]["default"]["missed"] == 2
    assert said["requests"]["ends"] == {"cancelled": 1, "finished": 4, "invalid": 1, "rejected": 1}
    assert said["errors"]["http 429"] == {"count": 1, "first": "full here"}
    assert said["generator"]["cpu_share"] == 0.1
    assert any("refused as wrong" in remark for remark in said["remarks"])


def test_what_was_never_reached_is_absent() -> None:
    said = told([record(1, [], End.FAILED, failure=Failure("connect", "no"))])
    assert not {"ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"} & set(said["all"])
    assert "output" not in said["tokens"]
    nothing = told([])
    assert "attainment" not in nothing["all"]
    assert nothing["all"]["goodput"] == 0
    assert nothing["generator"]["lag_ms"] is None
    one_token = told([record(1, [0.1])])
    assert "tpot_ms" not in one_token["all"]
    assert one_token["all"]["attainment"] == 1


def test_the_warm_up_is_not_judged() -> None:
    plan = Plan(PLAN.source, PLAN.objectives, PLAN.default, warm_up_s=5)
    said = told([record(1, [9.0, 99.0]), record(6, [0.1, 0.2])], plan)
    assert said["requests"] == {"sent": 2, "judged": 1, "ends": {"finished": 1}}
    assert said["all"]["attainment"] == 1
    assert said["all"]["goodput"] == 0.2  # one in the five seconds that are judged


def test_a_generator_that_was_late_says_so() -> None:
    good = told([record(at, [0.1, 0.2], lag_s=0.001) for at in range(100)])
    assert good["generator"]["kept_up"]
    assert good["remarks"] == []
    late = told([record(at, [0.1, 0.2], lag_s=0.3 if at < 3 else 0.0) for at in range(100)])
    assert not late["generator"]["kept_up"]
    assert "did not keep up" in late["remarks"][0]
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(figures(late))
    assert "sends late by 0 / 300 ms" in console.export_text()
    early = told([record(at, [0.1, 0.2], lag_s=-0.0005) for at in range(100)])
    assert early["generator"]["lag_ms"]["max"] == 0


def test_short_answers_and_missing_usage_are_remarked() -> None:
    short = told([record(at, [0.1, 0.2], output_tokens=1) for at in range(100)])
    assert short["tokens"]["short_answers"] == 100
    assert any("shorter than asked" in remark for remark in short["remarks"])
    blind = told([record(at, [0.1, 0.2], output_tokens=None, prompt_tokens=None) for at in range(100)])
    assert any("no usage" in remark for remark in blind["remarks"])


def test_settings_are_in_the_report() -> None:
    kinds = (Kind(Amount.parse("lognormal:200,0.5@10..900"), service_class="voice"),)
    plan = Plan(Source(arrivals=Arrivals.ramp(1, 5, 60), kinds=kinds, shape=Shape(duration_s=60), seed=4))
    settings = told([], plan)["settings"]
    assert settings["rate"] == [[0.0, 1], [60, 5]]
    assert settings["kinds"][0]["prompt"] == "lognormal:200,0.5@10..900"
    assert settings["shape"] == {"duration_s": 60}
    assert settings["objectives"]["default"] == {"ttft_ms": 10_000, "tpot_ms": 300}


def test_the_timeline_adds_up() -> None:
    records = [record(at / 10, [0.1, 0.2, 0.3]) for at in range(100)]
    rows = timeline(PLAN, records, bins=20)
    width = rows[1]["at_s"]
    assert len(rows) == 20
    for key, total in (("sent_per_s", 100), ("finished_per_s", 100), ("tokens_per_s", 300)):
        assert sum(row[key] * width for row in rows) == pytest.approx(total, rel=1e-2)
    assert max(row["running_most"] for row in rows) in (3, 4)
    assert timeline(PLAN, []) == []


# The search.


def server(limit: float, seed: int = 0, requests: int = 400) -> Any:
    """Attainment falls from 1 to 0 around a rate, with noise."""
    chance = random.Random(seed)

    def run(rate: float) -> Trial:
        share = 1 / (1 + math.exp((rate - limit) / (limit * 0.03)) * 0.05 / 0.95)
        attained = sum(chance.random() < share for _ in range(requests))
        return Trial(rate, attained, requests - attained)

    return run


def found(search: Search, run: Any) -> int:
    for count in range(200):
        step = search.next()
        if step.rate is None:
            return count
        search.apply(run(step.rate))
    raise AssertionError("it does not end")


@pytest.mark.parametrize("limit", [0.3, 1.0, 7.7, 140.0])
def test_the_rate_is_found(limit: float) -> None:
    for seed in range(5):
        search = Search()
        runs = found(search, server(limit, seed))
        assert search.passed is not None
        assert search.failed is not None
        assert search.passed == pytest.approx(limit, rel=0.08)
        assert search.passed < search.failed <= search.passed * 1.05
        assert runs < 40


def test_each_step_has_its_reason() -> None:
    search = Search(SearchSettings(start=4))
    assert search.next().why == "the first rate"
    search.apply(Trial(4, 400, 0))
    assert search.next().rate == 8
    search.apply(Trial(8, 100, 300))
    step = search.next()
    assert step.rate == pytest.approx(math.sqrt(32))
    assert "between 4/s, which passes, and 8/s" in step.why


def test_what_is_too_close_to_call_is_run_again() -> None:
    search = Search(SearchSettings(start=4, runs=3))
    for _ in range(3):
        step = search.next()
        assert step.rate == 4
        search.apply(Trial(4, 95, 5))
    assert search.passed == 4  # 95 % of all three, and no more runs
    search = Search(SearchSettings(start=4, runs=3))
    for _ in range(3):
        search.apply(Trial(4, 94, 6))
    assert (search.passed, search.failed) == (None, 4)


def test_the_ends_of_what_is_tried() -> None:
    search = Search(SearchSettings(start=1, most=3))
    found(search, lambda rate: Trial(rate, 400, 0))
    assert search.passed == 3
    assert "the most" in search.next().why
    search = Search(SearchSettings(start=1, least=0.2))
    found(search, lambda rate: Trial(rate, 0, 400))
    assert (search.passed, search.failed) == (None, 0.2)
    assert "the least" in search.next().why


def test_what_the_generator_cannot_do_bounds_the_search() -> None:
    """It is tried again, then what is below is looked at; no rate is said to fail."""
    rates = []

    def run(rate: float) -> Trial:
        rates.append(rate)
        return Trial(rate, 400, 0, kept_up=rate < 3)

    search = Search(SearchSettings(runs=2))
    found(search, run)
    assert rates[:5] == [1, 2, 4, 4, math.sqrt(8)]
    assert search.failed is None
    assert search.passed is not None
    assert search.reach is not None
    assert 2.8 < search.passed < 3 <= search.reach <= search.passed * 1.05
    assert "more than the generator can do" in search.next().why


def test_a_generator_that_stumbled_once_is_run_again() -> None:
    search = Search(SearchSettings(runs=2))
    search.apply(Trial(1, 0, 400, kept_up=False))
    assert search.next().rate == 1
    search.apply(Trial(1, 400, 0))
    assert (search.passed, search.failed, search.reach, search.next().rate) == (1, None, None, 2)


def test_runs_in_which_nothing_counts_do_not_pass() -> None:
    search = Search(SearchSettings(runs=2, least=1))
    found(search, lambda rate: Trial(rate, 0, 0))
    assert search.passed is None


@given(st.integers(1, 5000), st.floats(0.5, 0.99))
def test_a_run_is_given_up_only_when_it_has_failed(total: int, target: float) -> None:
    limit = hopeless_after(total, target, 1.28)
    assert wilson(total - limit, total, 1.28)[1] < target or limit == total
    if limit:
        assert wilson(total - limit + 1, total, 1.28)[1] >= target


def test_a_run_as_a_trial() -> None:
    records = [record(1, [0.1, 0.2]), record(2, [0.1, 0.9]), record(3, [], End.REJECTED)]
    trial = figures_of_trial(PLAN, records, 4.0, 10.0, "")
    assert (trial.rate, trial.attained, trial.missed, trial.goodput, trial.kept_up) == (4.0, 1, 2, 0.1, True)
    assert figures_of_trial(PLAN, records, 4.0, 10.0, "too many misses").goodput is None


def test_a_trace_is_played_at_the_rate_that_is_tried() -> None:
    source = Source(trace="x", shape=Shape(speed=3)).at_rate(8.0, 5, natural=2.0)
    assert (source.shape.speed, source.seed) == (4.0, 5)
    source = Source(arrivals=Arrivals.steady(1, 2.5)).at_rate(8.0, 5)
    assert source.arrivals == Arrivals.steady(8, 2.5)


# Plots.


def svg(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=700))
def test_a_cdf_rises_to_one(values: list[float]) -> None:
    points = cdf(values)
    assert len(points) <= 201
    assert points[-1] == (max(values), 1)
    assert points[0][0] == min(values)
    assert all(a <= b and p < q for (a, p), (b, q) in pairwise(points))


@given(
    st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9)), max_size=20),
    st.booleans(),
    st.booleans(),
)
@example([(0.0, 5e-324), (5e-324, 0.0)], False, False)
@example([(5e-324, 1e9), (1.5e-323, 1.0)], True, True)
@example([(-1e9, -1e9 + 1e-6), (-1e9 + 1e-6, -1e9)], False, False)
def test_every_point_is_inside_the_picture(points: list[tuple[float, float]], x: bool, y: bool) -> None:
    drawn = svg(
        plot("t <&>", Axis("x", x), Axis("y", y), [Series("s", points, marks=True)], [Rule("r", 3.0)])
    )
    marks = drawn.findall(".//circle")
    assert len(marks) == len(points)
    for mark in marks:
        assert 62 <= float(mark.attrib["cx"]) <= 624
        assert 14 <= float(mark.attrib["cy"]) <= 256


def test_axes_have_round_numbers() -> None:
    drawn = svg(plot("t", Axis("ms", True), Axis("share", most=1.0), [Series("s", [(3, 0.1), (900, 0.97)])]))
    ticks = [text.text for text in drawn.iter("text") if "tick" in text.attrib.get("class", "")]
    assert ticks == ["5", "10", "20", "50", "100", "200", "500", "0", "0.2", "0.4", "0.6", "0.8", "1"]
    for values in ((8.59, 8.61), (9.96, 9.96), (19, 21)):
        drawn = svg(plot("t", Axis("ms", True), Axis("share"), [Series("s", [(one, 0.5) for one in values])]))
        along = [text for text in drawn.iter("text") if text.attrib.get("class") == "tick middle"]
        assert len(along) >= 2, "one can read off what it was"


def test_nothing_measured_is_a_picture_too() -> None:
    assert "nothing was measured" in plot("t", Axis("x"), Axis("y"), [Series("s", [])])


def test_pages_stand_alone_and_hold_what_was_measured() -> None:
    records = [record(at / 10, [0.1, 0.2, 0.3]) for at in range(100)]
    records.append(record(11, [], End.FAILED, failure=Failure("http 503", "<script>alert(1)</script>")))
    said = {**told(records), "server": {"url": "http://x", "model": "m"}, "began": "2026-01-01"}
    page = run_page(said, PLAN, records)
    trials = [Trial(1, 10, 0, goodput=1.0, facts={"ttft_ms": {"p50": 1, "p90": 2, "p99": 3}}), Trial(2, 1, 9)]
    search = {**said, "found": {"rate": 1, "failed": 2, "target": 0.95, "why": "done"}}
    for text in (page, find_page(search, trials)):
        assert text.count("<svg") == text.count("</svg>") >= 4
        assert not re.search(r"(src|href)=|url\(|@import", text)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "98.5%" in page or "99.0%" in page


def test_the_fleets_classes_are_the_rules_where_none_are_given() -> None:
    plan = Plan(Source())
    assert plan.of("interactive") == CLASSES["interactive"]
    assert plan.of("") == plan.of("unknown") == CLASSES["standard"]
