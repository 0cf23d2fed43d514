"""The simulator: the same every time, right where it can be worked out by hand, and able to tell policies
apart; its models of time."""

from __future__ import annotations

import asyncio
import io
import json
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner
from rich.console import Console

from fleet import virtual_time
from fleet.objectives import Objectives
from fleet.workload import Amount, Arrivals, Conversation, Kind, Piece, Turn, drawn
from fleetctl.__main__ import main
from fleetctl.sim.devices import GPUS, MODELS
from fleetctl.sim.play import simulate
from fleetctl.sim.policies import Policy
from fleetctl.sim.report import report, table
from fleetctl.sim.runner import Host
from fleetctl.sim.speed import (
    Measured,
    Roofline,
    Sample,
    Work,
    benchmark_samples,
    error,
    fit,
    splitwise_samples,
)
from fleetctl.sim.words import Beside, Fault, Setup

SPEED = Measured(
    prompt_base_s=0.01, per_prompt_token_s=1e-4, per_pair_s=0.0, decode_base_s=0.01, per_decode_s=1e-4
)
SETUP = Setup(
    SPEED,
    kv_bytes=1e5,
    kv_tokens=20_000,
    prefill=2,
    decode=2,
    objectives={"standard": Objectives(ttft_ms=400, tpot_ms=20)},
    block_size=16,
    step_tokens=512,
    decode_step_tokens=128,
    validate=True,
)


def shared(count, rate=20.0, prefixes=8, seed=1):
    """Short questions behind a few long beginnings."""
    kind = Kind(
        prompt=Amount.parse("20..60"), output=Amount.parse("5..15"), prefix_tokens=800, prefixes=prefixes
    )
    conversations = drawn(Arrivals.steady(rate), [kind], seed)
    return [next(conversations) for _ in range(count)]


def found(setup, workload):
    said = report(setup, simulate(setup, workload))
    del said["cpu_s"]
    return said


def test_two_runs_find_the_same_faults_included():
    setup = replace(
        SETUP,
        routers=2,
        faults=(Fault("decode-0", "crash", 0.6, 0.5), Fault("prefill-1", "freeze", 0.5, 0.3)),
    )
    one, other = found(setup, shared(40, rate=40)), found(setup, shared(40, rate=40))
    assert one == other
    assert one["requests"] == {"sent": 40, "judged": 40, "ends": {"finished": 40}}
    assert one["routers"]["failovers"] > 0


def test_goodput_is_what_one_works_out_by_hand():
    def alone(at_s, prompt):
        return Conversation(at_s, (Turn((Piece(f"{at_s}", prompt),), 11),))

    # Nobody waits for anybody: a prompt takes 10 ms for each step of 512 tokens and 0.1 ms a token.
    workload = [alone(0.0, 500), alone(2.0, 3000), alone(4.0, 3800), alone(10.0, 100)]
    played = simulate(SETUP, workload)
    ttft = [one.outcome.ttft_s for one in played.asked]
    assert ttft == pytest.approx([0.06, 0.36, 0.46, 0.02], abs=0.002)
    # The hand-off is before the second token; nine more steps of one sequence follow.
    step_s = 0.01 + 1e-4
    tpot = [one.outcome.tpot_s for one in played.asked]
    assert all(step_s <= one < step_s + 0.005 for one in tpot)
    said = report(SETUP, played)
    assert said["all"]["missed_by"] == {"ttft": 1}
    assert (said["all"]["attained"], said["all"]["goodput"]) == (3, pytest.approx(3 / 10))
    assert said["transfers"]["pulls"] >= 4


def test_warm_up_is_not_judged():
    setup = replace(SETUP, warm_up_s=1.0)
    said = found(setup, shared(40))
    judged = said["requests"]["judged"]
    assert 0 < judged < 40
    assert said["all"]["attained"] + said["all"]["missed"] == judged


def test_policies_differ_as_they_must():
    """Twelve beginnings fill the memory of one worker and a half: who sends each to where it is cached finds
    more of it than who does not know."""
    setup = replace(SETUP, admission="off", kv_tokens=6400)
    share = {}
    for policy in Policy:
        said = found(replace(setup, policy=policy), shared(80, rate=10, prefixes=12))
        assert said["requests"]["ends"] == {"finished": 80}
        share[policy] = said["roles"]["prefill"]["cached_share"]
    assert share[Policy.PRECISE] >= share[Policy.APPROXIMATE] > share[Policy.ROUND_ROBIN]
    assert share[Policy.PRECISE] > 1.2 * max(share[Policy.RANDOM], share[Policy.LEAST_LOADED])


def test_aggregated_workers_compute_prompts_themselves():
    said = found(replace(SETUP, prefill=0), shared(20))
    assert list(said["roles"]) == ["decode"]
    assert said["routers"]["prefills_local"] == said["routers"]["finished_length"] == 20
    assert "handoffs" not in said["routers"]


def test_later_turns_repeat_what_was_answered():
    talk = Conversation(0.0, (Turn((Piece("a", 64),), 33), Turn((Piece("b", 10),), 4, think_s=1.0)))
    played = simulate(SETUP, [talk])
    assert [one.prompt_tokens for one in played.asked] == [64, 64 + 33 + 10]
    assert played.asked[1].cached_tokens >= 64


def test_a_workload_without_requests_is_an_error():
    with pytest.raises(ValueError, match="empty"):
        simulate(SETUP, [])


def test_a_fit_finds_what_the_times_were_made_of():
    true = Measured(0.02, 6e-5, 7e-9, 0.03, 2e-4, 1.8e-7)
    works = [Work(prompt=n, pairs=n * (n + 1) // 2) for n in (128, 512, 2048, 8192)]
    works += [Work(decodes=n, context=n * size) for n in (1, 4, 32) for size in (128, 1024, 8192)]
    samples = [Sample(work, true.step_s(work)) for work in works]
    made = fit(samples)
    assert error(made, samples) < 1e-6
    assert made.per_pair_s == pytest.approx(true.per_pair_s, rel=1e-3)
    # A step of both has one base.
    both = Work(prompt=100, pairs=5050, decodes=2, context=300)
    assert made.step_s(both) == pytest.approx(0.03 + 100 * 6e-5 + 5050 * 7e-9 + 2 * 2e-4 + 300 * 1.8e-7)


def test_no_part_of_a_fit_is_negative():
    samples = [Sample(Work(prompt=n, pairs=n * n // 2), 0.1 + n * 1e-4 - n * n * 1e-9) for n in (10, 99, 999)]
    samples.append(Sample(Work(decodes=1, context=10), 0.02))
    made = fit(samples)
    assert min(made.as_dict()[name] for name in ("prompt_base_s", "per_prompt_token_s", "per_pair_s")) >= 0
    assert error(made, samples) < 0.05


def test_a_fit_needs_both_kinds():
    with pytest.raises(ValueError, match="of prompts and of decodes"):
        fit([Sample(Work(prompt=10, pairs=55), 0.1)])


def test_splitwise_rows_and_what_there_is_instead():
    lines = [
        "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel",
        "m,h100-80gb,512,2,128,100.0,30.0,4",
    ]
    prompt, decode = splitwise_samples(lines, "m", "h100-80gb", 4)
    assert prompt == Sample(Work(prompt=1024, pairs=512 * 513), 0.1)
    assert decode == Sample(Work(decodes=2, context=2 * 576), 0.03)
    with pytest.raises(ValueError, match="m on 4 h100-80gb"):
        splitwise_samples(lines, "m", "a100-80gb", 4)


def test_rows_of_our_own_benchmarks():
    rows = [
        {"case": "engine/prefill", "p50": 500.0, "settings": {"prompt": 100, "chunk": 512, "threads": 1}},
        {"case": "engine/prefill", "p50": 400.0, "settings": {"prompt": 2048, "chunk": 512, "threads": 1}},
        {"case": "engine/decode", "p50": 50.0, "settings": {"batch": 8, "context": 512, "threads": 1}},
        {"case": "engine/decode", "p50": 99.0, "settings": {"batch": 8, "context": 512, "threads": 2}},
    ]
    samples = benchmark_samples([json.dumps(row) for row in rows], threads=1)
    assert samples == [
        Sample(Work(prompt=100, pairs=5050), 0.2),
        Sample(Work(decodes=8, context=8 * 512), 0.16),
    ]


def test_a_roofline_reads_or_computes():
    speed = Roofline(MODELS["llama-3.1-8b"], GPUS["h100"])
    reading = speed.step_s(Work(decodes=1, context=100))
    weights = 2 * 8.03e9 / (3.35e12 * speed.bytes_share)
    assert reading == pytest.approx(weights + speed.overhead_s, rel=0.01)
    prompt = Work(prompt=8192, pairs=8192 * 8193 // 2)
    flops = 2 * 8.03e9 * 8192 + 4 * 32 * 4096 * prompt.pairs
    assert speed.step_s(prompt) == pytest.approx(flops / (989e12 * speed.flops_share) + speed.overhead_s)
    assert speed.kv_tokens() == int((72e9 - 16.06e9) / 131072)


def test_the_command_says_it_as_one_object_and_as_a_table(tmp_path):
    records = tmp_path / "records.jsonl"
    flags = ["sim", "--prefill", "1", "--decode", "1", "--rate", "5", "--requests", "5", "--prompt", "100"]
    flags += ["--output", "5", "--seed", "1", "--slo", "ttft=1000,tpot=50"]
    done = CliRunner().invoke(main, [*flags, "--json", "--records", str(records)])
    assert done.exit_code == 0, done.output
    said = json.loads(done.output)
    assert said["all"]["attained"] == 5
    assert said["workload"]["seed"] == 1
    assert [json.loads(line)["outcome"]["tokens"] for line in records.read_text().splitlines()] == [5] * 5
    shown = CliRunner(env={"COLUMNS": "160"}).invoke(main, flags)
    assert "attainment" in shown.output
    assert "100.0%" in shown.output


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "gpt-9"], "llama-3.1-8b"),
        (["--model", "bloom-176b"], "--gpus"),
        (["--fault", "burn:router@1"], "crash:prefill-0@30+10"),
        (["--fault", "crash:prefill-7@1"], "prefill-7"),
    ],
)
def test_what_cannot_be_is_said_with_what_could(flags, said):
    rest = ["--rate", "1", "--requests", "3", "--prompt", "10", "--output", "2", "--seed", "1"]
    done = CliRunner().invoke(main, ["sim", *flags, *rest])
    assert done.exit_code == 1
    assert said in done.output


def test_workers_of_one_host_slow_each_other_where_they_share_it():
    """A prompt is computed beside a running answer, and then alone: by hand, each step takes its factor."""
    running = Conversation(0.0, (Turn((Piece("a", 64),), 200),))
    prompts = [Conversation(at_s, (Turn((Piece(f"{at_s}", 500),), 1),)) for at_s in (1.0, 9.0)]
    setup = replace(SETUP, prefill=1, decode=1, beside=Beside(prompt=2.0, decode=1.5))
    beside, alone = (simulate(one, [running, *prompts]).asked for one in (setup, replace(SETUP, decode=1)))
    shared, later = (one.outcome.ttft_s for one in beside[1:])
    assert later == pytest.approx(0.06, abs=0.002)
    assert shared == pytest.approx(2 * 0.06, abs=0.002)
    gaps, free = (sorted(one[0].outcome.gaps) for one in (beside, alone))
    step_s = 0.01 + 1e-4
    assert gaps[100] == free[100] == pytest.approx(step_s, abs=1e-5)
    # While 0.12 s of a prompt are computed, steps of the running answer are half as long again.
    assert sum(gap > 1.4 * step_s for gap in gaps[:-1]) == pytest.approx(0.12 / (1.5 * step_s), abs=2)
    # Workers of different hosts share nothing.
    apart = simulate(replace(setup, workers_per_host=1), [running, *prompts]).asked
    assert apart[1].outcome.ttft_s == pytest.approx(0.06, abs=0.002)


def test_a_step_is_slowed_only_while_another_computes():
    """A second of a prompt, twice as slow beside others; from its middle on 0.2 s of a step, half as slow
    again: that one ends after 0.3 s, in which 0.15 s of the prompt are done."""
    ended = {}

    async def step(host, start_s, seconds, work, name):
        await asyncio.sleep(start_s)
        await host.compute(seconds, work)
        ended[name] = asyncio.get_running_loop().time()

    async def both():
        host = Host(Beside(prompt=2.0, decode=1.5))
        await asyncio.gather(
            step(host, 0.0, 1.0, Work(prompt=9), "prompt"),
            step(host, 0.5, 0.2, Work(decodes=1), "answer"),
        )
        given_up = asyncio.create_task(step(host, 0.0, 9.0, Work(prompt=9), "given up"))
        asyncio.get_running_loop().call_later(0.15, given_up.cancel)
        await step(host, 0.0, 0.2, Work(decodes=1), "beside it")

    virtual_time.run(both())
    assert ended == pytest.approx({"answer": 0.8, "prompt": 1.15, "beside it": 1.15 + 0.25})


def test_how_busy_workers_were_is_told_by_the_second():
    """Three prompts of 60 ms in three seconds, on one of two workers at a time; what runs out after the last
    was asked is in the seconds, and not in the share."""
    workload = [Conversation(at_s, (Turn((Piece(f"{at_s}", 500),), 60),)) for at_s in (0.0, 1.0, 2.0, 3.0)]
    role = simulate(replace(SETUP, prefill=1, decode=1), workload).roles["prefill"]
    assert role.busy_share == pytest.approx(3 * 0.06 / 3, abs=0.002)
    assert role.busy == pytest.approx([0.06, 0.06, 0.06, 0.06], abs=0.002)


def test_a_worker_beside_others_is_not_faster():
    with pytest.raises(ValueError, match="not faster than alone"):
        Beside(decode=0.9)


class Parts(HTMLParser):
    """Texts of a page, and how many elements of each kind."""

    def __init__(self, page):
        super().__init__()
        self.count, self.text = Counter(), ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.count[tag] += 1
        assert not {"src", "href"} & {name for name, _ in attrs}, "a page needs nothing else"

    def handle_data(self, data):
        self.text += data


def test_the_page_shows_what_was_found_by_class_and_by_role(tmp_path):
    page = tmp_path / "sim.html"
    flags = ["sim", "--prefill", "1", "--decode", "2", "--rate", "8", "--requests", "12", "--output", "20"]
    flags += ["--prompt", "500", "--seed", "1", "--kind", "class=interactive", "--kind", "class=<batch>"]
    done = CliRunner().invoke(main, [*flags, "--html", str(page)])
    assert done.exit_code == 1
    assert "no name of a class" in done.output
    flags[-1] = "class=batch"
    done = CliRunner().invoke(main, [*flags, "--json", "--html", str(page)])
    assert done.exit_code == 0, done.output
    said, parts = json.loads(done.output), Parts(page.read_text())
    assert parts.count["svg"] == 7
    for word in (
        "interactive",
        "batch",
        "Time in which workers computed",
        "1 prefill",
        "2 decode",
        "KV moved",
    ):
        assert word in parts.text
    assert f"{said['all']['attainment']:.1%}" in parts.text
    assert set(said["busy_by_second"]) == {"prefill", "decode"}
    nowhere = CliRunner().invoke(main, [*flags, "--html", str(tmp_path / "none" / "sim.html")])
    assert nowhere.exit_code == 1
    assert "no folder" in nowhere.output


def test_the_table_fits_a_terminal_of_80_columns():
    workload = shared(30, rate=40)
    said = report(SETUP, simulate(SETUP, workload))
    # Figures of a long day in an overloaded fleet.
    said["classes"]["standard"] |= {
        "ttft_ms": {"p50": 123456.7, "p90": 234567.8, "p99": 345678.9},
        "attained": 123456,
    }
    said["roles"]["prefill"]["counters"]["computed_tokens"] = 123_456_789
    console = Console(width=80, file=io.StringIO())
    with console.capture() as shown:
        console.print(table(said))
    assert "…" not in shown.get(), shown.get()
    assert "attainment" in shown.get()
