"""Attention over the paged KV pool: one protocol, one module a backend."""
