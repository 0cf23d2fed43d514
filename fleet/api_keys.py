"""API keys: who a client is and how much it may ask. Files hold hashes, never keys. Pure.

A keys file has one JSON object a line; empty lines and lines that begin with # are skipped:

    {"sha256": "…64 hex digits…", "tenant": "acme", "class": "interactive", "requests_per_minute": 600}
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection, Iterable

import msgspec

from fleet.objectives import CLASS_NAME

_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ApiKey(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    rename={"slo_class": "class"},
):
    """A line of a keys file. ValueError: the tenant's name, the hash or a limit is none."""

    sha256: str
    """Of the key, in hex. Keys are drawn with 256 bits, so a slow hash would protect nothing more."""
    tenant: str
    """Whose key it is: several keys of a tenant share cached prompts, two tenants never do."""
    slo_class: str = ""
    """Objectives and priority of its requests, by name. Empty: the routers' default."""
    weight: float = 1.0
    """Share of the fleet against other tenants, where there is not enough for all."""
    requests_per_minute: int = 0
    """0: no limit, as for the two below."""
    tokens_per_minute: int = 0
    """Of prompts and answers together."""
    concurrent_requests: int = 0
    admin: bool = False
    """Whether it shows the requests of all tenants; without it a key shows those of its own."""

    def __post_init__(self) -> None:
        if not _SHA256.fullmatch(self.sha256):
            raise ValueError("sha256 must be 64 hex digits in lower case")
        if not _TENANT.fullmatch(self.tenant):
            raise ValueError("tenant must be 1 to 64 letters, digits, dots, hyphens or underscores")
        if self.slo_class and not CLASS_NAME.fullmatch(self.slo_class):
            raise ValueError("class must be the name of one: small letters, digits and hyphens")
        if not 0 < self.weight < float("inf"):
            raise ValueError("weight must be a number above 0")
        for name in ("requests_per_minute", "tokens_per_minute", "concurrent_requests"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")

    @property
    def short(self) -> str:
        """What routers call it among each other: enough of the hash to tell keys apart, and no more."""
        return self.sha256[:16]

    def line(self) -> str:
        """For a keys file."""
        return msgspec.json.encode(self).decode()


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def read_file(text: str) -> tuple[ApiKey, ...]:
    """The keys of a file. ValueError names the line, and never shows it: it could be a key by mistake."""
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            key = msgspec.json.decode(line, type=ApiKey)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ValueError(f"line {number} is not a key's JSON object: {error}") from None
        if key.sha256 in keys:
            raise ValueError(f"line {number} has the same key as an earlier one")
        keys[key.sha256] = key
    if not keys:
        raise ValueError("it holds no key; make one with: fleetctl key new --tenant NAME")
    return tuple(keys.values())


def read_list(text: str) -> tuple[ApiKey, ...]:
    """From TENANT:KEY, several separated by commas: no limits, the default class. ValueError."""
    keys: list[ApiKey] = []
    for number, entry in enumerate((part.strip() for part in text.split(",")), 1):
        tenant, separator, key = entry.partition(":")
        if not separator or len(key) < 16:
            raise ValueError(f"entry {number} is not TENANT:KEY with a key of 16 characters or more")
        keys.append(ApiKey(sha256=digest(key), tenant=tenant))
    return tuple(keys)


def check_classes(keys: Iterable[ApiKey], classes: Collection[str]) -> None:
    """ValueError: a key has a class that is not there."""
    for key in keys:
        if key.slo_class and key.slo_class not in classes:
            raise ValueError(
                f"a key of {key.tenant} has the class {key.slo_class}; there are: {', '.join(classes)}"
            )


def find(keys: Iterable[ApiKey], presented: bytes) -> ApiKey | None:
    """The key with the hash of what a client presents, in a time that says nothing of the others."""
    wanted = hashlib.sha256(presented).hexdigest()
    found = None
    for key in keys:
        if hmac.compare_digest(wanted, key.sha256):
            found = key
    return found


def salt(tenant: str, secret: str) -> str:
    """Of a tenant's block hashes: not to be guessed from published hashes without the secret."""
    return hmac.new(secret.encode(), b"pdfleet tenant\0" + tenant.encode(), hashlib.sha256).hexdigest()[:32]
