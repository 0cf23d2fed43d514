"""Computes prompts and lends their KV."""
