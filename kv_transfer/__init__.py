"""Bytes between pools: regions, leases, pull plans, and transports behind one protocol."""
