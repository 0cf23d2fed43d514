"""How long the registry may take before it counts as away."""

from __future__ import annotations

CALL_LIMIT_S = 3.0
"""After which a store that does not answer is away."""
