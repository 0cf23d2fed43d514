"""Tokens in, tokens out, on one replica; knows no sockets, no fleet beside it."""
