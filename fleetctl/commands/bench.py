"""`bench`: load on any OpenAI server, judged by objectives; `bench find`: the highest rate that attains."""

from __future__ import annotations

import asyncio
import datetime
import functools
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from fleet.errors import BadRequest, Unavailable
from fleetctl.options import Target, fleet_options

if TYPE_CHECKING:
    from fleetctl.bench.plan import Plan, Source
    from fleetctl.bench.play import Probe, Run, Snapshot
    from fleetctl.bench.prompts import Vocabulary
    from fleetctl.bench.search import Search, Trial
    from fleetctl.bench.words import Server

_SERVER = (
    click.option("--url", metavar="URL", help="Of the server.  [default: the fleet that is up here]"),
    click.option("--model", default="", metavar="NAME", help="[default: the first that the server lists]"),
    click.option(
        "--api", type=click.Choice(["chat", "completions"]), default="chat", show_default=True,
        help="Route that is asked.",
    ),
    click.option(
        "--api-key", default="", envvar="PDFLEET_API_KEY", show_envvar=True, metavar="KEY",
        help="Sent as a bearer token.",
    ),
    click.option("--header", "headers", multiple=True, metavar="NAME:VALUE", help="Sent with each request."),
    click.option(
        "--class-header", default="x-slo-class", show_default=True, metavar="NAME",
        help="Header that names the class of a request.",
    ),
    click.option(
        "--body", multiple=True, metavar="FIELD=JSON", help="Further field of each body: --body temperature=0"
    ),
    click.option(
        "--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), default=300.0, show_default=True,
        metavar="SECONDS", help="After this a request is given up.",
    ),
    click.option(
        "--tokenizer", default="", metavar="PATH",
        help="tokenizer.json of the model, or its folder: proves that prompts have the tokens they should.",
    ),
)  # fmt: skip
WORKLOAD = (
    click.option(
        "--trace", type=click.Path(exists=True, dir_okay=False), metavar="FILE",
        help="Replays it: Mooncake's JSON lines, Azure's CSV, or a prefill/decode log; .gz or not.",
    ),
    click.option(
        "--cv", type=click.FloatRange(0), default=1.0, show_default=True,
        help="Variation of the gaps between arrivals: 0 an even beat, 1 Poisson, above 1 bursts.",
    ),
    click.option(
        "--duration", "duration_s", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
        help="How long requests are sent.  [default: 30; of a trace: all of it]",
    ),
    click.option("--prompt", default="256", show_default=True, metavar="AMOUNT", help="Tokens of a prompt."),
    click.option("--output", default="64", show_default=True, metavar="AMOUNT", help="Tokens of an answer."),
    click.option("--prefix-tokens", type=click.IntRange(0), default=0, help="Shared beginning of prompts."),
    click.option("--prefixes", type=click.IntRange(1), default=1, help="How many different ones there are."),
    click.option(
        "--popularity", type=click.FloatRange(0), default=0.0,
        help="The n-th of them is asked for as n^-POPULARITY: 0 all alike.",
    ),
    click.option("--turns", default="1", metavar="AMOUNT", help="Turns of a conversation."),
    click.option(
        "--think", default="exponential:5", show_default=True, metavar="AMOUNT",
        help="Seconds from an answer to the next turn.",
    ),
    click.option("--class", "service_class", default="", metavar="NAME", help="Class of the requests."),
    click.option(
        "--kind", "kinds", multiple=True, metavar="TEXT",
        help="A kind of a mix: 'class=batch share=0.3 prompt=lognormal:2000,0.5 output=256'; "
        "what it leaves out is as the flags say.",
    ),
    click.option("--speed", type=click.FloatRange(0.001), default=1.0, help="Factor of a trace."),
    click.option("--skip", "skip_s", type=click.FloatRange(0), default=0.0, help="Leaves out its start."),
    click.option(
        "--length-scale", type=click.FloatRange(0, min_open=True), default=1.0,
        help="Factor on all token counts of prompts and answers.",
    ),
    click.option("--prompt-limit", type=click.IntRange(1), metavar="TOKENS", help="Longer prompts are cut."),
    click.option("--output-limit", type=click.IntRange(1), metavar="TOKENS", help="Longer answers are cut."),
    click.option(
        "--map-class", "classes", multiple=True, metavar="FROM=TO", help="Class of a trace by another name."
    ),
    click.option("--seed", type=click.IntRange(0), help="Of arrivals, lengths and texts.  [default: new]"),
)  # fmt: skip
JUDGED = (
    click.option(
        "--slo", "slos", multiple=True, metavar="TEXT",
        help="Objectives, ms: ttft=2000,tpot=150 (also itl, itl_percentile, e2e); of one class "
        "NAME:ttft=500,tpot=50.  [default: those of the fleet's classes]",
    ),
    click.option(
        "--warm-up", "warm_up_s", type=click.FloatRange(0), default=0.0, metavar="SECONDS",
        help="What is due before this is asked and not judged.",
    ),
)  # fmt: skip
HTML = (
    click.option(
        "--html", type=click.Path(dir_okay=False, writable=True, path_type=Path), metavar="FILE",
        help="Writes a report with plots there.",
    ),
)  # fmt: skip
_RULES = (
    *JUDGED,
    click.option("--natural-end", is_flag=True, help="Answers may end before their length."),
    click.option(
        "--lag-limit", "lag_limit_ms", type=click.FloatRange(0, min_open=True), default=25.0,
        show_default=True, metavar="MS",
        help="Lag of the generator (p99) above which a run says that it is not to be trusted.",
    ),
    *HTML,
)  # fmt: skip


def options(*groups: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds the options of these groups to a command, in their order."""
    every = [option for group in groups for option in group]
    return lambda command: functools.reduce(lambda inner, option: option(inner), reversed(every), command)


RATE = (
    click.option(
        "--rate", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True, metavar="N",
        help="Conversations a second that begin, whatever has been answered.",
    ),
    click.option(
        "--ramp-to", type=click.FloatRange(0), metavar="N", help="The rate rises or falls to this evenly."
    ),
    click.option("--requests", type=click.IntRange(1), metavar="N", help="Ends after so many conversations."),
    click.option(
        "--records", type=click.Path(dir_okay=False, writable=True, path_type=Path), metavar="FILE",
        help="Writes each request as a JSON line there.",
    ),
)  # fmt: skip
_FIND = (
    click.option(
        "--target", "wanted", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.95,
        show_default=True, metavar="SHARE", help="Share of requests that must attain their objectives.",
    ),
    click.option(
        "--start", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True, metavar="N",
        help="First rate.",
    ),
    click.option(
        "--most", type=click.FloatRange(0, min_open=True), default=1000.0, show_default=True, metavar="N",
        help="Highest rate that is tried.",
    ),
    click.option(
        "--tolerance", type=click.FloatRange(0, min_open=True), default=0.05, show_default=True,
        help="How much above the highest rate that passes one may fail.",
    ),
    click.option(
        "--runs", type=click.IntRange(1), default=3, show_default=True,
        help="Most runs at one rate that is too close to call.",
    ),
    click.option(
        "--pause", "pause_s", type=click.FloatRange(0), default=1.0, show_default=True, metavar="SECONDS",
        help="Between two runs.",
    ),
)  # fmt: skip


@click.group(invoke_without_command=True)
@fleet_options(etcd=False)
@options(_SERVER, RATE, WORKLOAD, _RULES)
def bench(target: Target, html: Path | None, records: Path | None, **given: Any) -> None:
    """Ask a server for answers in open loop, and say how many met their objectives.

    An AMOUNT is a number, 100..500, normal:MEAN,DEVIATION, lognormal:MEDIAN,SIGMA or exponential:MEAN, with
    bounds behind it, if any: lognormal:200,0.8@16..2000. `bench find` finds the highest rate that attains.
    """
    context = click.get_current_context()
    if context.invoked_subcommand is not None:
        _none_given(context)
        return
    check_writable(html, records)
    server, probe, words, plan = _prepare(target, given)
    with _Screen(target.as_json) as screen:
        sends_s = plan.source.shape.duration_s
        run = _play(server, plan, words, screen, server.model, None if math.isinf(sends_s) else sends_s)
    report = {**_about(server, probe, given, run), **_report(plan, run)}
    if records is not None:
        records.write_text("".join(json.dumps(one.as_dict()) + "\n" for one in run.records))
    if html is not None:
        from fleetctl.bench.page import run_page

        html.write_text(run_page(report, plan, run.records), encoding="utf-8")
    from fleetctl.bench.report import timeline

    if target.as_json:
        target.say("", **report, timeline=timeline(plan, run.records))
        return
    from fleetctl.bench.view import figures
    from fleetctl.view import terminal

    terminal().print(figures(report))
    for path in (html, records):
        if path is not None:
            click.echo(f"written: {path}")


@bench.command()
@fleet_options(etcd=False)
@options(_SERVER, _FIND, WORKLOAD, _RULES)
def find(target: Target, html: Path | None, **given: Any) -> None:
    """Find the highest rate at which enough requests attain their objectives.

    Doubles the rate until it fails, then halves the bracket; repeats what is too close to call. A trace is
    played faster or slower, so that its conversations begin at the rate that is tried.
    """
    from fleetctl.bench.report import figures_of_trial
    from fleetctl.bench.search import Search, SearchSettings, hopeless_after

    given |= {"rate": given["start"], "ramp_to": None, "requests": None}
    given["duration_s"] = given["duration_s"] or 30.0
    # Fewer than twenty requests say nothing: a lower rate needs longer runs.
    judged_s = given["duration_s"] - given["warm_up_s"]
    least = min(given["start"], 20 / judged_s) if judged_s > 0 else given["start"]
    settings = SearchSettings(
        given["wanted"],
        given["start"],
        least,
        given["most"],
        given["tolerance"],
        given["runs"],
    )
    check_writable(html)
    server, probe, words, plan = _prepare(target, given)
    natural = _natural_rate(plan.source) if plan.source.trace else None
    search, interrupted = Search(settings), ""
    began = time.time()
    with _Screen(target.as_json) as screen:
        while (step := search.next()).rate is not None:
            screen.tell(search.trials, step.why)
            # More than are to be expected: it is ended early only where it fails for sure.
            mean = step.rate * judged_s
            expected = math.ceil(mean + 2 * max(1.0, given["cv"]) * math.sqrt(mean))
            one = replace(
                plan,
                source=plan.source.at_rate(step.rate, plan.source.seed + len(search.trials), natural),
                misses_limit=hopeless_after(expected, settings.target, settings.confidence),
            )
            run = _play(server, one, words, screen, f"{step.rate:.4g}/s", given["duration_s"])
            search.apply(figures_of_trial(one, run.records, step.rate, run.sending_s, run.interrupted))
            if run.interrupted == "interrupted":
                interrupted = run.interrupted
                break
            time.sleep(given["pause_s"])
    report = {
        "server": _server_fields(server, probe),
        "began": _stamp(began),
        "settings": {**plan.as_dict(), "duration_s": given["duration_s"]},
        "found": _found(search, interrupted),
        "runs": [_trial_fields(one) for one in search.trials],
        "remarks": _search_remarks(search),
    }
    if html is not None:
        from fleetctl.bench.page import find_page

        html.write_text(find_page(report, search.trials), encoding="utf-8")
    if target.as_json:
        target.say("", **report)
        return
    from fleetctl.bench.view import trials
    from fleetctl.view import terminal

    passed = search.passed
    said = f"{passed:.4g} requests/s" if passed is not None else "no rate"
    terminal().print(trials(search.trials, f"ended: {interrupted or step.why}"))
    click.secho(f"{said} with {settings.target:.0%} attainment", bold=True)
    if html is not None:
        click.echo(f"written: {html}")


def _none_given(context: click.Context) -> None:
    """Flags before a subcommand would do nothing."""
    for name in context.params:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"flags stand behind `find`: fleetctl bench find --{name.replace('_', '-')} …"
            )


def check_writable(*paths: Path | None) -> None:
    """Before the work, not after it."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise BadRequest(f"{path} cannot be written: there is no folder {path.parent}")


def _prepare(target: Target, given: Mapping[str, Any]) -> tuple[Server, Probe, Vocabulary, Plan]:
    """All that can be wrong is said here, before anything is measured."""
    from fleetctl.bench.play import probe, trace_lines, whole_words
    from fleetctl.bench.prompts import Vocabulary

    try:
        plan = plan_of(given)
        lines = trace_lines(plan.source.trace) if plan.source.trace else ()
        first = next(plan.source.conversations(lines), None)
    except ValueError as error:
        raise BadRequest(str(error)) from None
    server = _server(target, given)
    if first is None:
        raise BadRequest("the workload is empty: no conversation begins before its end")
    words = whole_words(given["tokenizer"]) if given["tokenizer"] else None
    found = asyncio.run(probe(server))
    words = words or Vocabulary(tokens_per_word=found.tokens_per_word)
    plan = replace(plan, ignore_eos=found.ignore_eos and not given["natural_end"])
    return replace(server, model=found.model), found, words, plan


def _server(target: Target, given: Mapping[str, Any]) -> Server:
    from fleetctl.bench.words import Server

    url = given["url"]
    if url is None:
        state = target.state()
        if state is None:
            raise Unavailable(
                f"fleet {target.fleet!r} is not up on this machine; start it with `fleetctl up`, or name a "
                "server with --url"
            )
        url = state.router
    headers = dict(_pair(one, ":", "--header", "NAME:VALUE") for one in given["headers"])
    body = {}
    for one in given["body"]:
        name, value = _pair(one, "=", "--body", "FIELD=JSON")
        try:
            body[name] = json.loads(value)
        except ValueError:
            body[name] = value  # Words need no quotes.
    return Server(
        url, given["model"], given["api"] == "chat", given["api_key"], headers,
        given["class_header"], body, given["timeout_s"],
    )  # fmt: skip


def _pair(text: str, sign: str, flag: str, form: str) -> tuple[str, str]:
    name, found, value = text.partition(sign)
    if not found or not name.strip():
        raise BadRequest(f"{flag} {text!r} is not {form}")
    return name.strip(), value.strip()


def plan_of(given: Mapping[str, Any]) -> Plan:
    """What these flags come to. Raises `ValueError` and `BadRequest`."""
    import secrets

    from fleet.objectives import CLASS_NAME, CLASSES, STANDARD
    from fleet.workload import Amount, Arrivals, Kind, Shape
    from fleetctl.bench.plan import Plan, Source, parse_kind, parse_objectives

    usual = Kind(
        Amount.parse(given["prompt"]), Amount.parse(given["output"]), 1.0, given["service_class"],
        given["prefix_tokens"], given["prefixes"], given["popularity"],
        Amount.parse(given["turns"]), Amount.parse(given["think"]),
    )  # fmt: skip
    kinds = tuple(parse_kind(one, usual) for one in given["kinds"]) or (usual,)
    classes = dict(_pair(one, "=", "--map-class", "FROM=TO") for one in given["classes"])
    for name in (given["service_class"], *classes.values()):
        if name and not CLASS_NAME.fullmatch(name):
            raise BadRequest(f"{name!r} is no name of a class")
    trace = given["trace"] or ""
    duration_s = given["duration_s"]
    if duration_s is None:
        duration_s = math.inf if trace or given["requests"] else 30.0
    if given["ramp_to"] is not None:
        if math.isinf(duration_s):
            raise BadRequest("--ramp-to needs a --duration, in which the rate gets there")
        arrivals = Arrivals.ramp(given["rate"], given["ramp_to"], duration_s, given["cv"])
    else:
        arrivals = Arrivals.steady(given["rate"], given["cv"])
    if given["warm_up_s"] >= duration_s:
        raise BadRequest("--warm-up is as long as --duration: nothing would be judged")
    named = dict(parse_objectives(one) for one in given["slos"])
    # Said without a class they are those of all requests but of the classes that were named.
    default = named.pop("", None)
    objectives = named if default is not None else {**CLASSES, **named}
    shape = Shape(
        given["speed"], given["skip_s"], duration_s, given["requests"], given["length_scale"],
        given["prompt_limit"], given["output_limit"],
        classes,
    )  # fmt: skip
    seed = given["seed"] if given["seed"] is not None else secrets.randbelow(1 << 32)
    source = Source(trace, arrivals, kinds, shape, seed)
    return Plan(
        source,
        objectives,
        default or CLASSES[STANDARD],
        given["warm_up_s"],
        lag_limit_ms=given["lag_limit_ms"],
    )


def _natural_rate(source: Source) -> float:
    """Conversations a second of a trace as it was recorded, after what is skipped."""
    from fleetctl.bench.play import trace_lines

    recorded = replace(source, shape=replace(source.shape, speed=1.0, duration_s=math.inf))
    times = [one.at_s for one in recorded.conversations(trace_lines(source.trace))]
    if len(times) < 2 or times[-1] <= times[0]:
        raise BadRequest(f"the trace {source.trace} has too few arrivals for a rate")
    return (len(times) - 1) / (times[-1] - times[0])


def _play(
    server: Server, plan: Plan, words: Vocabulary, screen: _Screen, title: str, sends_s: float | None
) -> Run:
    from fleetctl.bench.play import in_process

    return in_process(server, plan, words, lambda seen: screen.show(seen, sends_s, title))


def _report(plan: Plan, run: Run) -> dict[str, Any]:
    from fleetctl.bench.report import report

    return report(
        plan, run.records, sending_s=run.sending_s, total_s=run.total_s, cpu_s=run.cpu_s,
        connections=run.connections, unasked=run.unasked, interrupted=run.interrupted,
    )  # fmt: skip


def _about(server: Server, probe: Probe, given: Mapping[str, Any], run: Run) -> dict[str, Any]:
    about = {"server": _server_fields(server, probe), "began": _stamp(run.began_at)}
    return about | ({"tokenizer": given["tokenizer"]} if given["tokenizer"] else {})


def _server_fields(server: Server, probe: Probe) -> dict[str, Any]:
    """Without keys and headers, which may be secrets."""
    return {
        "url": server.url,
        "model": server.model,
        "api": "chat" if server.chat else "completions",
        "body": dict(server.body),
        "timeout_s": server.timeout_s,
        "probes": probe.requests,
        "tokens_per_word": round(probe.tokens_per_word, 3),
    }


def _stamp(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat(timespec="seconds")


def _trial_fields(trial: Trial) -> dict[str, Any]:
    from fleetctl.bench.search import Trial

    assert isinstance(trial, Trial)
    return {"rate": trial.rate, "kept_up": trial.kept_up, **trial.facts}


def _search_remarks(search: Search) -> list[str]:
    said = []
    if search.reach is not None:
        said.append(
            f"from {search.reach:.4g}/s on the generator itself did not keep up: the server may do more than "
            "what was found"
        )
    return said


def _found(search: Search, interrupted: str) -> dict[str, Any]:
    from fleetctl.bench.search import last_facts

    found = {
        "rate": search.passed,
        "failed": search.failed,
        "target": search.settings.target,
        "figures": last_facts(search.trials, search.passed),
        "why": interrupted or search.next().why,
    }
    return {key: value for key, value in found.items() if value is not None}


class _Screen:
    """The live view, where there is a terminal for it; it goes to the error output."""

    def __init__(self, quiet: bool) -> None:
        from rich.live import Live

        from fleetctl.view import terminal

        console = terminal(stderr=True)
        self._live = Live(console=console, auto_refresh=False, transient=True) if not quiet else None
        if not console.is_terminal:
            self._live = None
        self._before: Any = None

    def __enter__(self) -> _Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, snapshot: Snapshot, sends_s: float | None, title: str) -> None:
        if self._live is not None:
            from rich.console import Group

            from fleetctl.bench.view import live

            now = live(snapshot, sends_s, title)
            self._live.update(Group(self._before, "", now) if self._before is not None else now, refresh=True)

    def tell(self, done: list[Trial], why: str) -> None:
        """The runs so far stay above the one that runs."""
        if self._live is not None:
            from fleetctl.bench.view import trials

            self._before = trials(done, why)
            self._live.update(self._before, refresh=True)
