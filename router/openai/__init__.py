"""The OpenAI-compatible HTTP surface."""
