"""Forecasts: what a decode step takes by its batch, and that nothing waits while workers stand idle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_worker import card, report, request

from fleet.events import LoadReport
from fleet.ids import WorkerId
from fleet.member import Role
from fleet.objectives import Objectives
from router.admission import Act, Admission, Decision
from router.cost import Ask, choose_prefill
from router.forecast import Forecast, Ratio, forecast, step_s
from router.roster import LinkState, Pool, Roster, Standing
from router.run import Terms
from router.settings import AdmissionSettings, CostSettings, FlowSettings, UnknownSettings
from router.step_line import StepLine

COST = CostSettings()
REMOTE = CostSettings(local_prefill_tokens=0, local_advantage=1e9)
P1, P2 = card("p1", Role.PREFILL), card("p2", Role.PREFILL)
D1, D2 = card("d1"), card("d2")
CARDS = {one.id: one for one in (P1, P2, D1, D2)}
STANDARD = Terms("standard", Objectives(ttft_ms=2000, tpot_ms=25), "a")


def pool(*reports: LoadReport) -> tuple[Roster, Pool]:
    roster = Roster(UnknownSettings())
    roster.apply_view({one.worker: CARDS[one.worker] for one in reports})
    for one in reports:
        roster.apply_link(one.worker, one.incarnation, LinkState.UP)
        roster.apply_load(one, 1.0)
    return roster, roster.pools("m")[0]


def standing(roster: Roster, worker: WorkerId) -> Standing:
    found = roster.get(worker)
    assert found is not None
    return found


def foreseen(pool: Pool, cost: CostSettings = REMOTE, tokens: int = 1000) -> Forecast:
    choice = choose_prefill(pool, Ask(tokens, {}, tie=0), cost)
    assert choice is not None
    return forecast(pool, choice, 128.0, cost)


def arrives(admission: Admission, cast: Forecast, terms: Terms = STANDARD) -> Decision:
    made = request(f"r{len(admission)}")
    admission.enter(made, 0.0)
    return admission.arrive(made, terms, cast, 0.0, 0.0)[0]


def test_a_line_through_reports_finds_what_each_sequence_takes() -> None:
    line = StepLine()
    for _ in range(50):
        line.learn(20.0, 0.05)
    assert line.each_s is None, "one size of batch tells nothing of others"
    for n in range(200):
        batch = 5.0 + n % 30
        line.learn(batch, 0.01 + 0.002 * batch)
    assert line.each_s == pytest.approx(0.002, rel=0.02)


def test_larger_batches_that_were_faster_are_not_believed() -> None:
    line = StepLine()
    for n in range(200):
        line.learn(5.0 + n % 30, 0.1 - 0.001 * (n % 30))
    assert line.each_s == 0.0


def test_a_step_is_foreseen_for_the_batch_that_there_would_be() -> None:
    roster, _ = pool(report(P1), report(D1, running=30, decode_step_s=0.03, decode_batch=30.0))
    worker = standing(roster, D1.id)
    assert step_s(worker, 30, COST) == pytest.approx(0.03)
    assert step_s(worker, 35, COST) == pytest.approx(0.03 * 1.1), "by the setting, while no line is known"
    assert step_s(worker, 1, COST) < 0.02
    for n in range(100):
        batch = 5.0 + n % 30
        told = report(D1, running=int(batch), decode_step_s=0.009 + 0.0007 * batch, decode_batch=batch)
        roster.apply_load(told, 2.0)
    for batch in (1, 10, 50):
        assert step_s(worker, batch, COST) == pytest.approx(0.009 + 0.0007 * batch, rel=0.05)


def test_a_decode_worker_whose_crowd_has_left_is_not_as_slow_as_the_crowd_was() -> None:
    """It runs nothing, so it measures nothing new: by what it measured last all would wait for long."""
    roster, both = pool(
        report(P1, running=10, queued_tokens=1000),
        report(D1, running=30, decode_step_s=0.03, decode_batch=30.0),
        report(D2, running=30, decode_step_s=0.03, decode_batch=30.0),
    )
    admission = Admission(FlowSettings(), AdmissionSettings())
    assert (
        arrives(admission, foreseen(both)).why
        == "with 35 sequences a token would take 33.6 ms, more than 22.5 ms"
    )
    roster.apply_load(report(D2, running=0, decode_step_s=0.03, decode_batch=30.0), 1.5)
    cast = foreseen(both)
    assert not cast.idle, "prompts are computed that will go there"
    assert cast.sequences == 5
    assert arrives(Admission(FlowSettings(), AdmissionSettings()), cast).act is Act.ADMIT


loads = st.tuples(st.integers(0, 40), st.integers(0, 20), st.integers(0, 50_000), st.floats(0.001, 0.2))


@given(
    loads,
    loads,
    st.integers(0, 1),
    st.integers(0, 1),
    st.integers(10, 4000),
    st.floats(0.1, 8.0),
    st.booleans(),
)
def test_nothing_waits_while_a_worker_of_each_role_stands_idle(
    prefill: tuple[int, int, int, float],
    decode: tuple[int, int, int, float],
    idle_prefill: int,
    idle_decode: int,
    tokens: int,
    late: float,
    local: bool,
) -> None:
    """Whatever the others do, whatever was promised and however late outcomes have come."""

    def busy(one: tuple[int, int, int, float]) -> dict[str, object]:
        running, waiting, queued, step = one
        return {"running": running, "waiting": waiting, "queued_tokens": queued, "decode_step_s": step,
                "decode_batch": max(1.0, float(running))}  # fmt: skip

    # An idle one, too, has measured what it last did.
    stale = {"decode_step_s": decode[3], "decode_batch": 1.0}
    _, both = pool(
        *(report(one, **(stale if n == idle_prefill else busy(prefill))) for n, one in enumerate((P1, P2))),
        *(report(one, **(stale if n == idle_decode else busy(decode))) for n, one in enumerate((D1, D2))),
    )
    admission = Admission(FlowSettings(), AdmissionSettings())
    cast = foreseen(both, COST if local else REMOTE, tokens)
    for _ in range(30):
        admission.answered(request(), STANDARD, cast, 40, late * cast.tpot_s)
        admission.first_token(request(), cast, late * (cast.ahead_s + cast.work_s))
    running = arrives(admission, Forecast(0.0, 0.1, 0.001, 0, 10, 1000.0, False))
    assert running.act is Act.ADMIT, "one that relies on its TPOT runs"
    assert arrives(admission, cast).act is Act.ADMIT


def test_one_bad_batch_whose_answers_come_late_together_does_not_stop_all() -> None:
    ratio = Ratio()
    for n in range(60):
        ratio.learn(0.016, 0.016 * (0.95, 1.0, 1.05)[n % 3])
    for _ in range(6):
        ratio.learn(0.016, 0.016 * 1.3)
    assert ratio.safe(0.016) < 0.0225, (
        "a third late of six in sixty-six is not half as long again for everybody"
    )
    for _ in range(60):
        ratio.learn(0.016, 0.016 * 1.5)
    assert ratio.safe(0.016) > 0.0225, "one that stays is believed"
