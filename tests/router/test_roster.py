"""The roster: who could serve what now, and how loaded each is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripted_worker import PRINT, card, report

from fleet.ids import LeaseId, RequestId
from fleet.member import MemberState, Role, WorkerCard
from router.roster import LinkState, Roster
from router.settings import UnknownSettings

P1, P2 = card("p1", Role.PREFILL), card("p2", Role.PREFILL)
D1, D2 = card("d1"), card("d2")
UNKNOWN = UnknownSettings()


def roster(*cards: WorkerCard, up: bool = True) -> Roster:
    made = Roster(UNKNOWN)
    made.apply_view({c.id: c for c in cards})
    for c in cards:
        if up:
            made.apply_link(c.id, c.incarnation, LinkState.UP)
    return made


def view(*cards: WorkerCard) -> dict[str, WorkerCard]:
    return {c.id: c for c in cards}


def usable(of: Roster, model: str = "m") -> set[str]:
    return {worker.id for pool in of.pools(model) for worker in (*pool.prefill, *pool.decode)}


def test_only_ready_workers_with_a_session_are_candidates() -> None:
    made = roster(P1, D1, up=False)
    assert usable(made) == set()
    assert "d1 is ready with its session opening" in (made.why_not("m") or "")
    made.apply_link(P1.id, P1.incarnation, LinkState.UP)
    assert made.why_not("m") == "m has no decode worker that is ready, only 1 for prefill"
    made.apply_link(D1.id, D1.incarnation, LinkState.UP)
    assert usable(made) == {"p1", "d1"}
    assert made.why_not("m") is None
    made.apply_view(view(P1, replace(D1, state=MemberState.DRAINING)))
    assert usable(made) == set()


def test_a_draining_worker_is_known_from_its_report_before_its_card() -> None:
    made = roster(P1, D1, D2)
    made.apply_load(report(D1, state="draining"), 1.0)
    assert usable(made) == {"p1", "d2"}


def test_decode_workers_alone_serve() -> None:
    assert usable(roster(D1)) == {"d1"}


def test_workers_with_different_fingerprints_are_never_in_one_pool() -> None:
    other = replace(PRINT, dtype="bfloat16")
    made = roster(P1, D1, card("p9", Role.PREFILL, fingerprint=other), card("d9", fingerprint=other))
    pools = [({w.id for w in pool.prefill}, {w.id for w in pool.decode}) for pool in made.pools("m")]
    assert sorted(pools, key=str) == sorted([({"p1"}, {"d1"}), ({"p9"}, {"d9"})], key=str)


def test_a_worker_that_names_blocks_differently_is_refused_aloud() -> None:
    odd = card("d9", fingerprint=replace(PRINT, hash_spec="builtin/0"))
    made = roster(D1, odd)
    assert usable(made) == {"d1"}
    assert made.refused == {"d9": "hash_spec: builtin/0 != blake2b-256-prefix/2"}


def test_a_removed_worker_is_gone_at_once() -> None:
    made = roster(P1, D1, D2)
    change = made.apply_view(view(P1, D1))
    assert [c.id for c in change.left] == ["d2"]
    assert usable(made) == {"p1", "d1"}
    assert made.get(D2.id) is None


def test_what_a_worker_runs_goes_on_when_its_lease_lapses_but_it_gets_nothing_new() -> None:
    made = roster(P1, D1, D2)
    made.sent(D2.id, RequestId("r"), 100, 7)
    change = made.apply_view(view(P1, D1))
    assert (change.left, change.doubted) == ((), ())
    assert usable(made) == {"p1", "d1"}
    assert made.apply_view(view(P1, D1, D2)).joined == (), "it was there all the time"
    assert usable(made) == {"p1", "d1", "d2"}
    made.apply_view(view(P1, D1))
    made.settle(D2.id, RequestId("r"))
    assert made.apply_view(view(P1, D1)).left == (D2,), "nothing runs there any more"
    made.apply_view(view(P1, D1, D2))
    made.apply_link(D2.id, D2.incarnation, LinkState.UP)
    made.sent(D2.id, RequestId("s"), 100, 7)
    made.apply_view(view(P1, D1))
    assert made.apply_link(D2.id, D2.incarnation, LinkState.LOST).left == (D2,)


def test_what_a_worker_keeps_for_a_reader_stays_when_its_lease_lapses() -> None:
    made = roster(P1, D1, D2)
    made.keeps(P1.id, LeaseId("l"))
    assert made.apply_view(view(D1, D2)).left == ()
    assert usable(made) == {"d1", "d2"}
    made.keeps_no_more(P1.id, LeaseId("l"))
    assert made.apply_view(view(D1, D2)).left == (P1,), "nobody waits for anything there any more"


def test_a_restarted_worker_is_another_one() -> None:
    made = roster(D1)
    made.sent(D1.id, RequestId("r"), 100, 7)
    again = card("d1", life="2")
    change = made.apply_view(view(again))
    assert (change.left, change.joined) == ((D1,), (again,))
    worker = made.get(D1.id)
    assert worker is not None
    assert (worker.link, worker.sent) == (LinkState.OPENING, {})
    assert not made.apply_load(report(D1), 1.0), "a report of the old life"


def test_a_worker_that_takes_another_role_changes_pools_and_nothing_else() -> None:
    made = roster(P1, P2, D1)
    made.sent(P2.id, RequestId("r"), 100, 7)
    drains = replace(P2, state=MemberState.DRAINING, turning=Role.DECODE)
    change = made.apply_view(view(P1, drains, D1))
    assert (change.joined, change.left, change.turned) == ((), (), ())
    assert usable(made) == {"p1", "d1"}
    turned = replace(P2, role=Role.DECODE)
    change = made.apply_view(view(P1, turned, D1))
    assert (change.joined, change.left, change.turned) == ((), (), (turned,))
    (pool,) = made.pools("m")
    assert [w.id for w in pool.prefill] == ["p1"]
    assert {w.id for w in pool.decode} == {"d1", "p2"}
    worker = made.get(P2.id)
    assert worker is not None
    assert (worker.link, list(worker.sent)) == (LinkState.UP, ["r"])


def test_a_worker_that_says_it_is_stalled_is_no_candidate() -> None:
    made = roster(D1, D2)
    made.apply_load(report(D1, state=MemberState.STALLED), 0.0)
    assert usable(made) == {"d2"}
    made.apply_load(report(D1), 1.0)
    assert usable(made) == {"d1", "d2"}


def test_workers_that_vanish_together_are_kept_while_their_sessions_live() -> None:
    made = roster(P1, D1, D2)
    change = made.apply_view({})
    assert change.left == ()
    assert set(change.doubted) == {"p1", "d1", "d2"}
    assert usable(made) == {"p1", "d1", "d2"}
    assert made.apply_view({}).doubted == (), "said once"
    gone = made.apply_link(D2.id, D2.incarnation, LinkState.LOST)
    assert gone.left == (D2,)
    assert usable(made) == {"p1", "d1"}
    made.apply_view(view(P1, D1))
    made.apply_view(view(D1))
    assert made.get(P1.id) is None, "listed again, it is removed like any other"


def test_what_an_emptied_registry_does_not_show_is_kept() -> None:
    made = roster(P1, P2, D1, D2)
    assert made.apply_view(view(P1, P2, D1), emptied=True).doubted == ("d2",)
    assert usable(made) == {"p1", "p2", "d1", "d2"}


def test_a_registry_that_is_away_removes_nobody() -> None:
    made = roster(P1, D1)
    assert made.apply_view({}, live=False).left == ()
    assert usable(made) == {"p1", "d1"}


def test_drained_workers_that_vanish_together_are_gone() -> None:
    made = roster(D1, D2)
    made.apply_view(view(*(replace(c, state=MemberState.DRAINING) for c in (D1, D2))))
    assert {c.id for c in made.apply_view({}).left} == {"d1", "d2"}


def test_load_counts_a_dispatch_at_once_and_only_once() -> None:
    made = roster(D1)
    worker = made.get(D1.id)
    assert worker is not None
    made.apply_load(report(D1, queued_tokens=50, running=1, blocks_free=20), 0.0)
    made.sent(D1.id, RequestId("r"), 100, 7)
    assert (worker.queued_tokens, worker.sequences, worker.blocks_free) == (150, 2, 13)
    made.apply_load(report(D1, queued_tokens=140, running=2, blocks_free=14, streams=("r",)), 0.25)
    assert (worker.queued_tokens, worker.sequences, worker.blocks_free) == (140, 2, 14)
    made.settle(D1.id, RequestId("r"))
    assert (worker.queued_tokens, worker.sequences) == (40, 1), "ended since the report"
    made.settle(D1.id, RequestId("r"))
    made.apply_load(report(D1), 0.5)
    assert (worker.queued_tokens, worker.sequences, worker.blocks_free) == (0, 0, 1024)


def test_a_dispatch_that_no_report_lists_is_a_phantom_by_the_second_one() -> None:
    made = roster(D1)
    worker = made.get(D1.id)
    assert worker is not None
    made.apply_load(report(D1), 0.0)
    made.sent(D1.id, RequestId("r"), 100, 7)
    made.apply_load(report(D1), 0.25)
    assert worker.queued_tokens == 100, "the report may have been written before the dispatch arrived"
    made.apply_load(report(D1), 0.5)
    assert (worker.queued_tokens, worker.sequences) == (0, 0)
    made.settle(D1.id, RequestId("r"))
    assert (worker.queued_tokens, worker.sequences) == (0, 0)


def test_unknown_figures_are_guesses_and_never_zero() -> None:
    made = roster(D1, D2)
    worker = made.get(D1.id)
    assert worker is not None
    assert worker.queued_tokens == UNKNOWN.queued_tokens
    assert worker.prefill_tokens_s == UNKNOWN.prefill_tokens_s
    made.apply_load(report(D1, prefill_tokens_s=None, decode_step_s=None, pull_bytes_s=None), 0.0)
    assert (worker.queued_tokens, worker.decode_step_s) == (0, UNKNOWN.decode_step_s)
    assert made.expire(5.0, max_age_s=6.0) == ()
    assert made.expire(7.0, max_age_s=6.0) == ("d1",)
    assert worker.queued_tokens == UNKNOWN.queued_tokens
    assert usable(made) == {"d1", "d2"}, "unknown load is no reason not to serve"


def test_who_has_measured_nothing_is_supposed_to_be_as_fast_as_its_like() -> None:
    """Were the guess slower than the others are, it would never be sent anything to measure."""
    made = roster(P1, D1, D2)
    made.apply_load(report(D1, prefill_tokens_s=20_000.0, decode_step_s=0.008, decode_batch=4.0), 0.0)
    made.apply_load(report(D2, prefill_tokens_s=None, decode_step_s=None, decode_batch=None), 0.0)
    made.apply_load(report(P1, prefill_tokens_s=None), 0.0)
    new, other_role = made.get(D2.id), made.get(P1.id)
    assert new is not None
    assert other_role is not None
    assert (new.prefill_tokens_s, new.decode_step_s, new.decode_batch) == (20_000.0, 0.008, 4.0)
    assert other_role.prefill_tokens_s == UNKNOWN.prefill_tokens_s
    # Its own figures are its own, however fast the others are.
    made.apply_load(report(D2, prefill_tokens_s=500.0, decode_step_s=0.05), 1.0)
    assert (new.prefill_tokens_s, new.decode_step_s) == (500.0, 0.05)


def test_models_name_what_is_known_though_it_cannot_serve_now() -> None:
    made = roster(D1, card("x1", model="other", state=MemberState.STARTING))
    assert made.models() == ("m", "other")
    assert "x1 is starting" in (made.why_not("other") or "")
    assert made.why_not("none") == "no worker serves none"


def test_what_an_idle_worker_measured_long_ago_does_not_keep_it_idle() -> None:
    """It measured a slow step in a bad moment; by that figure it would never get a request again."""
    made = roster(P1, D1, D2)
    slow, fast = report(D1, decode_step_s=0.03, decode_batch=1.0), report(D2, decode_step_s=0.01, running=4)
    worker = made.get(D1.id)
    assert worker is not None
    now = 0.0
    while now < UNKNOWN.fresh_s:
        made.apply_load(slow, now)
        made.apply_load(fast, now)
        assert (worker.decode_step_s, worker.decode_batch) == (0.03, 1.0), now
        now += 0.5
    for _ in range(100):
        now += 0.5
        made.apply_load(slow, now)
        made.apply_load(fast, now)
    assert worker.decode_step_s == pytest.approx(0.01, rel=0.02), "as the other one is"
    made.apply_load(replace(slow, running=1), now + 0.5)
    assert worker.decode_step_s == 0.03, "it works: its own figure is news"
    made.apply_load(replace(slow, decode_step_s=0.012), now + 1.0)
    assert worker.decode_step_s == 0.012, "it worked between two reports"


def test_a_fleet_that_is_idle_keeps_what_it_knows() -> None:
    made = roster(P1, D1)
    for now in (0.0, 1000.0, 2000.0):
        made.apply_load(report(D1, decode_step_s=0.02), now)
        made.apply_load(report(P1, prefill_tokens_s=50_000.0), now)
    decode, prefill = made.get(D1.id), made.get(P1.id)
    assert decode is not None
    assert prefill is not None
    assert (decode.decode_step_s, prefill.prefill_tokens_s) == (0.02, 50_000.0)
