"""How many of each role, and why: a pure core, and the process around it that has its decisions applied."""
