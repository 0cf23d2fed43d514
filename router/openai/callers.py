"""Who may ask, and how much: API keys, their tenants and their limits. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.api_keys import ApiKey, find, salt
from fleet.errors import Overloaded, Unauthorized


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


def _bucket(per_minute: int) -> _Bucket | None:
    return _Bucket(per_minute) if per_minute else None


class Quota:
    """What one key has used. Tokens are counted after the fact: one request may overdraw them, the next
    ones wait until the minute's average holds again."""

    def __init__(self, key: ApiKey) -> None:
        self._key = key
        self._requests = _bucket(key.requests_per_minute)
        self._tokens = _bucket(key.tokens_per_minute)
        self.running = 0

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
        if key.concurrent_requests and self.running >= key.concurrent_requests:
            raise Overloaded(
                f"{self.running} requests of this API key are running; its limit is "
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

    def leave(self) -> None:
        self.running -= 1

    def used(self, tokens: int) -> None:
        if self._tokens is not None:
            self._tokens.take(tokens)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks."""

    salt: str = ""
    """`Request.salt`."""
    priority: int = 0
    """`Request.priority`."""
    quota: Quota | None = None


ANYBODY = Caller()


class Callers:
    """All that may ask; anybody, where there were no keys at the start."""

    def __init__(self, keys: Sequence[ApiKey] = (), salt_secret: str = "") -> None:
        self._salt_secret = salt_secret
        self._callers: Mapping[ApiKey, Caller] = {}
        self.anybody = not keys
        self.change(keys)

    def change(self, keys: Sequence[ApiKey]) -> None:
        """These and no others from now on. Without any left nobody gets in."""
        quotas = {key.sha256: caller.quota for key, caller in self._callers.items()}
        callers: dict[ApiKey, Caller] = {}
        for key in keys:
            quota = quotas.get(key.sha256) or Quota(key)
            quota.now_of(key)
            callers[key] = Caller(salt(key.tenant, self._salt_secret), key.slo_class.priority, quota)
        self._callers = callers

    def caller(self, authorization: bytes | None) -> Caller:
        """By the value of the Authorization header. Raises `Unauthorized`."""
        if self.anybody:
            return ANYBODY
        scheme, _, presented = (authorization or b"").strip().partition(b" ")
        if not presented or scheme.lower() != b"bearer":
            raise Unauthorized("an API key is needed: send Authorization: Bearer KEY")
        key = find(self._callers, presented.strip())
        if key is None:
            raise Unauthorized("this API key is not known")
        return self._callers[key]
