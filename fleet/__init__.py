"""Words that cross a process boundary, and the plumbing that carries them; no domain decisions."""

__version__ = "0.1.0"
