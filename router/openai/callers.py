"""Who may ask, how much and on which terms: API keys, their tenants, limits and classes. Pure.

A request may choose another class than its key's, and ask for more than its class promises, by headers:

    x-slo-class: batch          a class of no higher priority than the key's own; without keys, any
    x-slo-ttft-ms: 500          a shorter time to the first token than the class's
    x-deadline-ms: 20000        the last byte within this time, or an error; at most http.deadline_s
    x-session-id: chat-17       the conversation it belongs to: see `Terms.session`
    x-pin-workers: decode-1     workers it must go to, joined by commas: see `Terms.pins`; admin keys only
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fleet.api_keys import ApiKey, check_classes, find, salt
from fleet.errors import BadRequest, Overloaded, Unauthorized
from fleet.events import KeyUse
from fleet.ids import Incarnation, WorkerId
from fleet.objectives import CLASSES, STANDARD, Objectives
from router.run import Terms

CALLER = "pdfleet.caller"
"""Key in the scope of a request: the `Caller`."""
CLASS, TTFT, DEADLINE = b"x-slo-class", b"x-slo-ttft-ms", b"x-deadline-ms"
SESSION, PINS = b"x-session-id", b"x-pin-workers"
_HEADERS = frozenset((CLASS, TTFT, DEADLINE, SESSION, PINS))
_NAME = re.compile(r"[\x21-\x7e]{1,128}")
"""Of a session or a worker."""
_PINS = 8
"""Most workers that one request may name."""


class _Bucket:
    """Refills evenly up to what a minute allows. May be overdrawn; then it is waited for."""

    def __init__(self, per_minute: int) -> None:
        self._most = per_minute
        self._level = float(per_minute)
        self._at = 0.0

    def wait_s(self, need: float, now: float) -> float:
        """Seconds until it holds `need`; 0: it does now."""
        self._level = min(self._most, self._level + (now - self._at) * self._most / 60)
        self._at = now
        return max(0.0, need - self._level) * 60 / self._most

    def take(self, amount: float) -> None:
        self._level -= amount

    def take_at(self, amount: float, now: float) -> None:
        """Filled up before: what was taken now is not given back for the time before."""
        self.wait_s(0, now)
        self.take(amount)


def _bucket(per_minute: int) -> _Bucket | None:
    return _Bucket(per_minute) if per_minute else None


class Quota:
    """What one key has used, here and at the other routers. Tokens are counted after the fact: one request
    may overdraw them, the next ones wait until the minute's average holds again."""

    def __init__(self, key: ApiKey, moved: Callable[[Quota], None] = lambda quota: None) -> None:
        """`moved` is told whenever something of it has changed here."""
        self._key = key
        self._moved = moved
        self._requests = _bucket(key.requests_per_minute)
        self._tokens = _bucket(key.tokens_per_minute)
        self.running = 0
        """Here."""
        self._asked = self._used = 0
        self._others: dict[Incarnation, KeyUse] = {}
        """By the life of another router: the last that was heard of it."""

    def now_of(self, key: ApiKey) -> None:
        """The same key with other limits: what runs still counts, and so does what a limit that stays saw."""
        if key.requests_per_minute != self._key.requests_per_minute:
            self._requests = _bucket(key.requests_per_minute)
        if key.tokens_per_minute != self._key.tokens_per_minute:
            self._tokens = _bucket(key.tokens_per_minute)
        self._key = key

    def enter(self, now: float) -> None:
        """Takes a request on. `Overloaded` names the limit and says when to come back."""
        key = self._key
        running = self.running + sum(use.running for use in self._others.values())
        if key.concurrent_requests and running >= key.concurrent_requests:
            raise Overloaded(
                f"{running} requests of this API key are running; its limit is "
                f"{key.concurrent_requests} (concurrent_requests)"
            )
        if self._tokens is not None and (wait := self._tokens.wait_s(1, now)):
            raise Overloaded(
                f"this API key has used its {key.tokens_per_minute} tokens a minute (tokens_per_minute)",
                retry_after_s=wait,
            )
        if self._requests is not None:
            if wait := self._requests.wait_s(1, now):
                raise Overloaded(
                    f"this API key has made its {key.requests_per_minute} requests a minute "
                    "(requests_per_minute)",
                    retry_after_s=wait,
                )
            self._requests.take(1)
        self.running += 1
        self._asked += 1
        self._moved(self)

    def leave(self) -> None:
        self.running -= 1
        self._moved(self)

    def used(self, tokens: int) -> None:
        self._used += tokens
        if self._tokens is not None:
            self._tokens.take(tokens)
        self._moved(self)

    @property
    def limited(self) -> bool:
        key = self._key
        return bool(key.requests_per_minute or key.tokens_per_minute or key.concurrent_requests)

    @property
    def name(self) -> str:
        return self._key.short

    def use(self) -> KeyUse:
        return KeyUse(self._key.short, self.running, self._asked, self._used)

    def heard(self, life: Incarnation, use: KeyUse, now: float) -> None:
        """What it has used at another router. Of what is heard first nobody knows when it was: only what
        comes on top of it counts for the minute."""
        before = self._others.get(life, use)
        self._others[life] = use
        if self._requests is not None:
            self._requests.take_at(max(0, use.requests - before.requests), now)
        if self._tokens is not None:
            self._tokens.take_at(max(0, use.tokens - before.tokens), now)

    def idle(self, life: Incarnation) -> None:
        """Nothing of it runs at that router."""
        if (use := self._others.get(life)) is not None and use.running:
            self._others[life] = replace(use, running=0)

    def forget(self, life: Incarnation) -> None:
        self._others.pop(life, None)


_STANDARD = Terms(STANDARD, CLASSES[STANDARD])


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks."""

    salt: str = ""
    """`Request.salt`."""
    quota: Quota | None = None
    terms: Terms = _STANDARD
    deadline_s: float = math.inf
    """What it asked for; the ingress's own limit holds besides."""
    admin: bool = False
    """Whether it may see what others ask, and what became of that."""

    def sees(self, tenant: str) -> bool:
        """Whether requests of that tenant are its business."""
        return self.admin or (self.quota is not None and tenant == self.terms.tenant)


ANYBODY = Caller()


class Callers:
    """All that may ask; anybody, where there were no keys at the start. Implements `router.peers.Limits`: a
    key's limits are those of all routers together."""

    def __init__(
        self,
        keys: Sequence[ApiKey] = (),
        salt_secret: str = "",
        objectives: Mapping[str, Objectives] = CLASSES,
        default_class: str = STANDARD,
    ) -> None:
        self._salt_secret = salt_secret
        self._objectives = objectives
        self._default_class = default_class
        # Where there are no keys there are no secrets either.
        self.anyone = Caller(terms=Terms(default_class, objectives[default_class]), admin=True)
        self._callers: Mapping[ApiKey, Caller] = {}
        self._quotas: dict[str, Quota] = {}
        """By the keys' short names."""
        self._running: dict[str, Quota] = {}
        self._moved: dict[str, Quota] = {}
        """Not told yet."""
        self._lately: dict[str, Quota] = {}
        """Changed since all was told."""
        self.tell: Callable[[], None] = lambda: None
        self.anybody = not keys
        self.change(keys)

    def change(self, keys: Sequence[ApiKey]) -> None:
        """These and no others from now on. Without any left nobody gets in. ValueError: a class is none."""
        check_classes(keys, self._objectives)
        quotas = {key.sha256: caller.quota for key, caller in self._callers.items()}
        callers: dict[ApiKey, Caller] = {}
        for key in keys:
            quota = quotas.get(key.sha256) or Quota(key, self._has_moved)
            quota.now_of(key)
            name = key.slo_class or self._default_class
            terms = Terms(name, self._objectives[name], key.tenant, key.weight)
            callers[key] = Caller(salt(key.tenant, self._salt_secret), quota, terms, admin=key.admin)
        self._callers = callers
        self._quotas = {one.quota.name: one.quota for one in callers.values() if one.quota is not None}

    # -- shared with other routers

    def _has_moved(self, quota: Quota) -> None:
        if not quota.limited:
            return
        name = quota.name
        if quota.running:
            self._running[name] = quota
        else:
            self._running.pop(name, None)
        self._moved[name] = self._lately[name] = quota
        self.tell()

    def take(self, whole: bool) -> tuple[KeyUse, ...]:
        moved, self._moved = self._moved, {}
        if whole:
            moved, self._lately = self._lately | self._running, {}
        return tuple(quota.use() for quota in moved.values())

    def heard(self, life: Incarnation, uses: Sequence[KeyUse], whole: bool, now: float) -> None:
        if whole:
            named = {use.key for use in uses}
            for name, quota in self._quotas.items():
                if name not in named:
                    quota.idle(life)
        for use in uses:
            if use.key in self._quotas:
                self._quotas[use.key].heard(life, use, now)

    def forget(self, life: Incarnation) -> None:
        for quota in self._quotas.values():
            quota.forget(life)

    # -- who asks

    def caller(self, authorization: bytes | None) -> Caller:
        """By the value of the Authorization header. Raises `Unauthorized`."""
        if self.anybody:
            return self.anyone
        scheme, _, presented = (authorization or b"").strip().partition(b" ")
        if not presented or scheme.lower() != b"bearer":
            raise Unauthorized("an API key is needed: send Authorization: Bearer KEY")
        key = find(self._callers, presented.strip())
        if key is None:
            raise Unauthorized("this API key is not known")
        return self._callers[key]

    def asked(self, caller: Caller, headers: Iterable[tuple[bytes, bytes]], deadline_s: float) -> Caller:
        """With what the headers of one request ask for. BadRequest names the header. `deadline_s`: the most
        that may be asked for."""
        pairs = [(name, value.strip()) for name, value in headers if name in _HEADERS]
        if not pairs:
            return caller
        given = dict(pairs)
        if len(given) < len(pairs):
            names = [name.decode() for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise BadRequest(f"{twice} is given more than once; send it once", param=twice)
        terms = caller.terms
        if CLASS in given:
            terms = self._of_class(terms, given[CLASS])
        promised = terms.objectives
        ttft_ms = deadline_ms = None
        if TTFT in given:
            most = promised.ttft_ms or deadline_s * 1000
            ttft_ms = _milliseconds(TTFT, given[TTFT], most, f"that of the class {terms.slo_class}")
        if DEADLINE in given:
            most = deadline_s * 1000
            deadline_ms = _milliseconds(DEADLINE, given[DEADLINE], most, "setting http.deadline_s")
        if SESSION in given:
            terms = replace(terms, session=_name(SESSION, given[SESSION]))
        if PINS in given:
            terms = replace(terms, pins=_pins(caller, given[PINS]))
        promised = promised.tightened(ttft_ms=ttft_ms, e2e_ms=deadline_ms)
        within_s = math.inf if deadline_ms is None else deadline_ms / 1000
        return replace(caller, terms=replace(terms, objectives=promised), deadline_s=within_s)

    def _of_class(self, terms: Terms, value: bytes) -> Terms:
        name = value.decode("latin-1")
        wanted = self._objectives.get(name)
        if wanted is None:
            shown = name if len(name) <= 40 else name[:40] + "…"
            raise BadRequest(
                f"{CLASS.decode()}: there is no class {shown!r}; there are: {', '.join(self._objectives)}",
                param=CLASS.decode(),
            )
        if not self.anybody and wanted.priority > terms.objectives.priority:
            raise BadRequest(
                f"{CLASS.decode()}: this API key has the class {terms.slo_class}; {name} is of a higher "
                "priority, which only another key gives",
                param=CLASS.decode(),
            )
        return replace(terms, slo_class=name, objectives=wanted)


def _name(header: bytes, value: bytes) -> str:
    name = value.decode("latin-1")
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"{header.decode()} takes names of 1 to 128 visible ASCII characters", param=header.decode()
        )
    return name


def _pins(caller: Caller, value: bytes) -> tuple[WorkerId, ...]:
    if not caller.admin:
        raise BadRequest(
            f"{PINS.decode()}: only an operator's key (fleetctl key new --admin) may choose workers",
            param=PINS.decode(),
        )
    names = value.split(b",")
    if len(names) > _PINS:
        raise BadRequest(
            f"{PINS.decode()} names {len(names)} workers; at most {_PINS} are possible", param=PINS.decode()
        )
    return tuple(WorkerId(_name(PINS, name.strip())) for name in names)


def _milliseconds(header: bytes, value: bytes, most: float, whose: str) -> float:
    try:
        number = math.nan if b"_" in value else float(value)
    except ValueError:
        number = math.nan
    if not 1 <= number <= most:
        raise BadRequest(
            f"{header.decode()} must be a number of ms from 1 to {most:g} ({whose})", param=header.decode()
        )
    return number
