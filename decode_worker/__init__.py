"""Brings or computes KV and writes tokens."""
