"""The commands, one module a group; each brings in what it needs only when it runs."""
