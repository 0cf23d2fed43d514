"""The choice of a worker and its reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from scripted_worker import card, report

from fleet.ids import RequestId, WorkerId
from fleet.member import Role, WorkerCard
from router.cost import Ask, Choice, choose_decode, choose_prefill
from router.roster import LinkState, Pool, Roster
from router.settings import CostSettings, UnknownSettings

COST = CostSettings()
PREFILL = [card(f"p{n}", Role.PREFILL) for n in range(1, 4)]
DECODE = [card(f"d{n}") for n in range(1, 4)]


def fleet(*cards: WorkerCard, loads: Mapping[str, Mapping[str, object]] = {}, unknown: str = "") -> Roster:
    made = Roster(UnknownSettings())
    made.apply_view({c.id: c for c in cards})
    for c in cards:
        made.apply_link(c.id, c.incarnation, LinkState.UP)
        if c.id != unknown:
            made.apply_load(report(c, **loads.get(c.id, {})), 0.0)
    return made


def pool(of: Roster) -> Pool:
    (made,) = of.pools("m")
    return made


def ask(tokens: int = 1000, matched: Mapping[str, int] = {}, tie: int = 0, **fields: object) -> Ask:
    return Ask(tokens, {WorkerId(w): n for w, n in matched.items()}, tie, **fields)  # type: ignore[arg-type]


def chosen(choice: Choice | None) -> Choice:
    assert choice is not None
    return choice


def test_the_reason_names_queue_cache_and_transfer() -> None:
    made = pool(fleet(PREFILL[0], DECODE[0], loads={"p1": {"queued_tokens": 10}, "d1": {"running": 2}}))
    choice = chosen(choose_prefill(made, ask(768, {"p1": 32}), COST))
    assert choice.why.startswith("10 queued tokens, 32/48 blocks cached, 1 of 2 near ")
    assert (choice.worker, choice.local, choice.tokens) == ("p1", False, 256)
    choice = chosen(choose_decode(made, ask(768, {"d1": 32}), COST, ticket=True))
    assert choice.why.startswith("0 queued tokens, 32/48 blocks cached, 2 sequences, transfer 0.1 ms")
    assert (choice.worker, choice.tokens, choice.blocks) == ("d1", 0, 17)


def test_cached_blocks_draw_a_prompt_until_the_queue_outweighs_them() -> None:
    idle = pool(fleet(*PREFILL, *DECODE))
    assert all(
        chosen(choose_prefill(idle, ask(4000, {"p2": 200}, tie), COST)).worker == "p2" for tie in range(9)
    )
    busy = pool(fleet(*PREFILL, *DECODE, loads={"p2": {"queued_tokens": 8000}}))
    assert chosen(choose_prefill(busy, ask(4000, {"p2": 200}), COST)).worker != "p2"


def test_measured_speed_counts() -> None:
    made = pool(fleet(PREFILL[0], PREFILL[1], DECODE[0], loads={"p1": {"prefill_tokens_s": 2000.0}}))
    assert {chosen(choose_prefill(made, ask(tie=tie), COST)).worker for tie in range(9)} == {"p2"}


def test_idle_equals_share() -> None:
    made = pool(fleet(*PREFILL, *DECODE, loads={"p3": {"prefill_tokens_s": 10_300.0}}))
    picks = Counter(chosen(choose_prefill(made, ask(tie=tie), COST)).worker for tie in range(300))
    assert set(picks) == {"p1", "p2", "p3"}
    assert max(picks.values()) <= 110
    picks = Counter(chosen(choose_decode(made, ask(tie=tie), COST, ticket=True)).worker for tie in range(300))
    assert max(picks.values()) <= 110
    once = [chosen(choose_prefill(made, ask(tie=7), COST)).worker for _ in range(3)]
    assert len(set(once)) == 1, "the same request always goes the same way"


def test_a_short_uncached_part_is_computed_by_the_decode_worker() -> None:
    made = pool(fleet(PREFILL[0], DECODE[0]))
    short = chosen(choose_prefill(made, ask(20), COST))
    assert (short.worker, short.local) == ("d1", True)
    assert "computes 20 tokens itself" in short.why
    assert not chosen(choose_prefill(made, ask(1000), COST)).local
    again = chosen(choose_prefill(made, ask(1000, {"d1": 61}), COST))
    assert (again.local, again.tokens) == (True, 24)
    never = replace(COST, local_prefill_tokens=0)
    assert not chosen(choose_prefill(made, ask(20), never)).local


def test_without_prefill_workers_decode_workers_do_it_all() -> None:
    made = pool(fleet(*DECODE, loads={"d1": {"queued_tokens": 9000}, "d2": {"running": 40}}))
    choice = chosen(choose_prefill(made, ask(3000), COST))
    assert (choice.worker, choice.local) == ("d3", True)
    assert "no prefill worker" in choice.why


def test_a_far_slower_prefill_pool_is_passed_over() -> None:
    made = pool(fleet(PREFILL[0], DECODE[0], loads={"p1": {"queued_tokens": 60_000}}))
    assert chosen(choose_prefill(made, ask(1000), COST)).local


def test_a_decode_worker_is_chosen_by_load_memory_and_what_it_lacks() -> None:
    made = pool(fleet(*DECODE, loads={"d1": {"running": 30}, "d2": {"blocks_free": 3}}))
    assert {chosen(choose_decode(made, ask(tie=t), COST, ticket=True)).worker for t in range(9)} == {"d3"}
    slow = {f"d{n}": {"pull_bytes_s": 1e6} for n in (1, 2, 3)}
    made = pool(fleet(*DECODE, loads=slow))
    choices = [chosen(choose_decode(made, ask(4000, {"d2": 240}, t), COST, ticket=True)) for t in range(9)]
    assert {c.worker for c in choices} == {"d2"}
    full = pool(fleet(DECODE[0], loads={"d1": {"blocks_free": 3}}))
    assert "only 3 blocks free" in chosen(choose_decode(full, ask(), COST, ticket=True)).why


def test_an_unknown_load_is_neither_best_nor_out() -> None:
    made = pool(fleet(PREFILL[0], PREFILL[1], DECODE[0], unknown="p1"))
    assert {chosen(choose_prefill(made, ask(tie=t), COST)).worker for t in range(9)} == {"p2"}
    made = pool(fleet(PREFILL[0], DECODE[0], unknown="p1"))
    choice = chosen(choose_prefill(made, ask(), replace(COST, local_advantage=100)))
    assert (choice.worker, choice.why[:12]) == ("p1", "load unknown")


def test_who_failed_it_or_cannot_hold_it_is_not_chosen() -> None:
    small = card("p2", Role.PREFILL, max_tokens=500)
    made = pool(fleet(PREFILL[0], small, DECODE[0]))
    assert {chosen(choose_prefill(made, ask(tie=t), COST)).worker for t in range(9)} == {"p1"}
    choice = chosen(choose_prefill(made, ask(avoid={PREFILL[0].incarnation}), COST))
    assert choice.worker == "d1"
    assert choose_decode(made, ask(avoid={DECODE[0].incarnation}), COST, ticket=True) is None
    assert choose_prefill(made, ask(9999), COST) is None


def test_many_routers_with_one_picture_do_not_all_run_to_the_best() -> None:
    cards = [card(f"p{n}", Role.PREFILL) for n in range(8)]
    loads = {c.id: {"queued_tokens": 2000} for c in cards[1:]}
    routers = [fleet(*cards, DECODE[0], loads=loads) for _ in range(16)]
    picks: Counter[str] = Counter()
    for number in range(160):
        router = routers[number % 16]
        tie = number * 0x9E3779B97F4A7C15 % 2**64
        choice = chosen(choose_prefill(pool(router), ask(1000, tie=tie, routers=16), COST))
        router.sent(choice.worker, RequestId(f"r{number}"), choice.tokens, choice.blocks)
        picks[choice.worker] += 1
    assert picks["p0"] > 20, "it is the best, and is taken more often"
    assert picks["p0"] <= 56
    assert min(picks[c.id] for c in cards) > 5


@pytest.mark.parametrize("gap_s", [0.0, 1.0])
def test_a_shared_prefix_keeps_affinity_when_idle_and_is_spread_under_load(gap_s: float) -> None:
    """Workers serve their queues in turn, 10,000 tokens a second; all prompts share 1,600 tokens."""
    cards = [card(f"p{n}", Role.PREFILL, max_tokens=100_000) for n in range(8)]
    roster = fleet(*cards, DECODE[0])
    # Brought from elsewhere, a prefix is worth little: nothing is left to draw anybody.
    cost = replace(COST, local_advantage=1e9, borrow_advantage=0.0)
    shared, own, speed = 100, 25, 10_000.0
    warm = {cards[0].id}
    free_at = dict.fromkeys((c.id for c in cards), 0.0)
    work: Counter[str] = Counter()
    running: list[tuple[float, WorkerId, RequestId]] = []
    picks: Counter[str] = Counter()
    hits = 0
    for number in range(200):
        now = number * gap_s
        for ended in [run for run in running if run[0] <= now]:
            running.remove(ended)
            roster.settle(ended[1], ended[2])
            warm.add(ended[1])
        tokens = (shared + own) * 16
        matched = dict.fromkeys(warm, shared)
        choice = chosen(choose_prefill(pool(roster), Ask(tokens, matched, number * 7919), cost))
        request = RequestId(f"r{number}")
        roster.sent(choice.worker, request, choice.tokens, choice.blocks)
        free_at[choice.worker] = max(now, free_at[choice.worker]) + choice.tokens / speed
        running.append((free_at[choice.worker], choice.worker, request))
        work[choice.worker] += choice.tokens
        picks[choice.worker] += 1
        hits += choice.worker in warm
    if gap_s:
        assert picks == {cards[0].id: 200}, "idle: the warm worker is always the fastest"
    else:
        assert max(work.values()) <= 1.5 * sum(work.values()) / len(cards)
        assert hits > 25


FAR = replace(COST, local_prefill_tokens=0, local_advantage=1e9)


def borrower(ask: Ask, loads: Mapping[str, Mapping[str, object]] = {}, **fields: object) -> Choice:
    made = pool(fleet(*PREFILL[:2], DECODE[0], loads=loads))
    return chosen(choose_prefill(made, ask, replace(FAR, **fields)))  # type: ignore[arg-type]


def test_a_prefix_is_brought_where_its_holder_is_busy() -> None:
    busy = {"p1": {"queued_tokens": 20_000}}
    choice = borrower(ask(4000, {"p1": 240}), busy)
    assert (choice.worker, choice.tokens) == ("p2", 160)
    assert choice.holder is not None
    assert (choice.holder.worker, choice.holder.blocks) == ("p1", 240)
    assert choice.holder.fingerprint == pool(fleet(*PREFILL[:2], DECODE[0])).digest
    assert choice.holder.compute_s == pytest.approx(240 * 16 / 10_000)
    assert "borrows 240 blocks of p1 in " in choice.why
    assert choice.seconds < borrower(ask(4000, {"p1": 240}), busy, borrow_advantage=0.0).seconds


def test_of_its_own_blocks_a_worker_brings_none_and_of_others_only_what_it_lacks() -> None:
    assert borrower(ask(4000, {"p1": 240})).worker == "p1"
    assert borrower(ask(4000, {"p1": 240})).holder is None
    choice = borrower(ask(4000, {"p1": 240, "p2": 100}), {"p1": {"queued_tokens": 20_000}})
    assert "100/250 blocks cached, borrows 140 blocks of p1" in choice.why


@pytest.mark.parametrize("depth", [250, 240])
def test_the_last_token_is_always_computed(depth: int) -> None:
    choice = borrower(ask(4000, {"p1": depth}), {"p1": {"queued_tokens": 20_000}})
    assert choice.holder is not None
    assert choice.holder.blocks == min(depth, 249)
    assert choice.tokens == 4000 - 16 * choice.holder.blocks > 0


def test_it_is_computed_where_that_is_about_as_soon() -> None:
    busy = {"queued_tokens": 20_000}
    slow = {"p1": busy, "p2": {"pull_bytes_s": 1e6}}
    assert borrower(ask(4000, {"p1": 240}), slow).holder is None
    assert borrower(ask(4000, {"p1": 2}), {"p1": busy}).holder is None


def test_decode_workers_bring_of_each_other_and_prefill_workers_of_them() -> None:
    busy = {"d1": {"running": 60, "queued_tokens": 3000}}
    made = pool(fleet(*DECODE[:2], loads=busy))
    choice = chosen(choose_decode(made, ask(4000, {"d1": 240}), COST, ticket=False))
    assert (choice.worker, choice.tokens) == ("d2", 160)
    assert choice.holder is not None
    assert choice.holder.worker == "d1"
    choice = borrower(ask(4000, {"d1": 240}), busy)
    assert choice.holder is not None
    assert (choice.holder.worker, choice.local) == ("d1", False)
    assert chosen(choose_decode(made, ask(4000, {"d1": 240}), COST, ticket=True)).holder is None


def test_who_is_lost_or_silent_is_not_asked() -> None:
    busy = {"p1": {"queued_tokens": 20_000}}
    lost = PREFILL[0].incarnation
    assert borrower(ask(4000, {"p1": 240}, avoid={lost}), busy).holder is not None, "only full"
    assert borrower(ask(4000, {"p1": 240}, avoid={lost}, lost={lost}), busy).holder is None
    made = pool(fleet(*PREFILL[:2], DECODE[0], unknown="p1"))
    assert chosen(choose_prefill(made, ask(4000, {"p1": 240}, avoid={lost}), FAR)).holder is None


def test_several_holders_are_asked_in_turn() -> None:
    made = pool(fleet(*PREFILL, DECODE[0], loads={p: {"queued_tokens": 50_000} for p in ("p1", "p2")}))
    choices = [chosen(choose_prefill(made, ask(4000, {"p1": 240, "p2": 240}, n), FAR)) for n in range(20)]
    assert {choice.worker for choice in choices} == {"p3"}
    assert {choice.holder.worker for choice in choices if choice.holder} == {"p1", "p2"}


def test_a_choice_keeps_the_best_the_taken_one_and_what_their_seconds_consist_of() -> None:
    cards = [card(f"p{n:02}", Role.PREFILL) for n in range(30)]
    loads = {c.id: {"queued_tokens": 100 * n, "running": n} for n, c in enumerate(cards)}
    made = pool(fleet(*cards, *DECODE, loads=loads))
    avoid = {cards[0].incarnation, cards[1].incarnation}
    choice = chosen(choose_prefill(made, ask(1000, {"p05": 40}, avoid=avoid), COST))
    seen = choice.considered
    assert len(seen.best) in (8, 9)
    assert choice.worker in {candidate.worker for candidate in seen.best}
    assert [c.seconds for c in seen.best[:8]] == sorted(c.seconds for c in seen.best[:8])
    assert len(seen.best) + seen.others + seen.left_out == 30 + len(DECODE)
    assert seen.left_out == 2
    assert avoid.isdisjoint(c.worker for c in seen.best)
    (cached,) = (c for c in seen.best if c.worker == "p05")
    assert (cached.queued_tokens, cached.sequences, cached.cached) == (500, 5, 40)
    assert cached.queue_s == pytest.approx(0.05)
    assert cached.compute_s == pytest.approx((1000 - 40 * 16) / 10_000)
    for c in seen.best:
        assert c.queue_s + c.compute_s + c.transfer_s + c.decode_s == pytest.approx(c.seconds)
    (taken,) = (c for c in seen.best if c.worker == choice.worker)
    assert (taken.seconds, taken.tokens) == (choice.seconds, choice.tokens)


def test_who_was_taken_is_shown_also_where_it_was_not_among_the_best() -> None:
    cards = [card(f"p{n:02}", Role.PREFILL) for n in range(20)]
    made = pool(fleet(*cards, DECODE[0], loads={c.id: {"queued_tokens": n} for n, c in enumerate(cards)}))
    for tie in range(40):
        choice = chosen(choose_prefill(made, ask(2000, tie=tie * 7919), COST))
        assert choice.worker in {c.worker for c in choice.considered.best}
        assert choice.considered.near == 20
        assert len(choice.considered.best) == 8 + (int(choice.worker[1:]) >= 8)
