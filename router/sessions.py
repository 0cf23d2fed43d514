"""Which workers the last turn of each conversation went to, where clients name their conversations. Pure."""

from __future__ import annotations

from collections import OrderedDict

from fleet.ids import WorkerId
from fleet.member import Role

_Key = tuple[str, str]


class Sessions:
    """Those used longest ago are forgotten first. A tenant's sessions are its own, however it names them."""

    def __init__(self, limit: int) -> None:
        """`limit`: sessions kept."""
        self._limit = limit
        self._last: OrderedDict[_Key, dict[Role, WorkerId]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def last(self, tenant: str, session: str) -> frozenset[WorkerId]:
        """At most one of each role; of no session: none."""
        return frozenset(self._last.get((tenant, session), {}).values()) if session else frozenset()

    def went(self, tenant: str, session: str, role: Role, worker: WorkerId) -> None:
        """Of no session: nothing."""
        if not session:
            return
        self._last.setdefault((tenant, session), {})[role] = worker
        self._last.move_to_end((tenant, session))
        while len(self._last) > self._limit:
            self._last.popitem(last=False)
