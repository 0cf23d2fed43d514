"""How many of each role, and why; pure, acts on nothing."""
