"""For all tests: hypothesis judges what happens, never how long it takes on a busy machine."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("pdfleet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pdfleet")
