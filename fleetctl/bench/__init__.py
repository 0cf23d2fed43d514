"""The load generator: open loop against any OpenAI server, judged by the rules of `fleet/goodput.py`."""
