"""The operator's commands and the one-machine supervisor."""
