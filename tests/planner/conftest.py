"""Lets the tests of this folder share `fluid_fleet`, and a router's `router_fleet` and `scripted_worker`."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "router")]
