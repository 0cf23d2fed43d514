"""Settings of the HTTP surface: where it listens, and every limit that it refuses by."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

_MAY_BE_ZERO = (
    "port",
    "open_metrics",
    "access_log",
    "vllm_names",
    "client_templates",
    "ping_s",
    "linger_s",
    "drain_limit_s",
)


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """The ingress. A request that is refused by a limit is told its name."""

    port: int = 8000
    """TCP port; 0 takes a free one."""
    keys_file: Path | None = None
    """File of API keys, one JSON object a line, made by `fleetctl key new`. With keys here or in
    `PDFLEET_API_KEYS` every route but /health, /ready and the page /dashboard needs one; without, anybody
    may ask."""
    keys_reload_s: float = 2.0
    """Seconds between looks at `keys_file`: a change of it holds from then on. While it is missing or broken,
    the keys stay as they were and an error is logged."""
    tls_cert: Path | None = None
    """PEM file of the server's certificate and its chain; given with `tls_key`, only https is spoken."""
    tls_key: Path | None = None
    """PEM file of its private key."""
    salt_secret: str = field(default="", repr=False)
    """Keys the salts by which tenants' caches are kept apart: the same on every router of a fleet. Flags
    are seen by everybody on the machine: prefer the environment."""
    open_metrics: bool = False
    """Whether /metrics and /fleet/targets need no key either."""
    access_log: bool = False
    """Whether each request is told in a line of JSON on standard output: see docs/metrics.md."""
    vllm_names: bool = False
    """Whether figures that vLLM has too are also told under its names: see docs/metrics.md."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may ask from a browser, such as https://chat.example; * is all. None by default."""
    max_requests: int = 4096
    """Requests served at the same time; more are answered 429."""
    max_body_bytes: int = 8 << 20
    """Largest body; counted while it comes in, whatever its header says."""
    body_timeout_s: float = 30.0
    """Longest a client may take to send a body, seconds."""
    max_header_bytes: int = 32 << 10
    """Largest request line and headers together."""
    max_headers: int = 100
    """Most header lines."""
    header_timeout_s: float = 10.0
    """Longest a client may take to send the headers, seconds."""
    idle_timeout_s: float = 75.0
    """Seconds after which a connection without a request is closed."""
    max_messages: int = 2048
    """Messages in a conversation."""
    max_sequences: int = 128
    """Answers of one request: prompts × n."""
    max_prompt_tokens: int = 1 << 20
    """Longest prompt in tokens, whatever the model's context."""
    max_answer_tokens: int = 1 << 20
    """Tokens that all answers of one request may have together: prompts × n × max_tokens. A request that
    gives no max_tokens shares them out among its answers."""
    template_kwargs: tuple[str, ...] = ("enable_thinking", "thinking", "reasoning_effort")
    """Names that clients may set for the chat template by chat_template_kwargs."""
    client_templates: bool = False
    """Whether a chat may bring its own chat_template. It is rendered in a sandbox, in a process of its own,
    within `text.template_seconds` and 512 MiB; that process takes a fifth of a second to start."""
    max_template_characters: int = 65536
    """Length of such a chat_template."""
    max_tools: int = 128
    """Tools that a chat may offer; OpenAI allows as many."""
    max_tool_bytes: int = 256 << 10
    """Size of all tools as JSON, descriptions and parameters included."""
    max_schema_characters: int = 65536
    """Length of a JSON schema or structural tag, written without spaces."""
    max_schema_depth: int = 64
    """How deep a JSON schema or structural tag may be nested."""
    max_regex_characters: int = 1024
    """Length of a regular expression: its compile time grows faster than it does."""
    max_grammar_characters: int = 16384
    """Length of an EBNF grammar, or of all choices together."""
    max_choices: int = 1024
    """Strings of which an answer must be one."""
    max_stops: int = 4
    """Stop strings; OpenAI allows as many."""
    max_stop_characters: int = 512
    """Length of a stop string."""
    max_stop_token_ids: int = 128
    """Entries in stop_token_ids."""
    max_logit_bias: int = 1024
    """Entries in logit_bias."""
    max_logprobs: int = 20
    """Most likely tokens shown at each position."""
    max_followers: int = 16
    """Streams of news of requests, for `fleetctl trace` and the like, that are read at the same time; by keys
    that are no admin's half as many, together."""
    ping_s: float = 15.0
    """Seconds without a frame after which a stream gets a comment, so that nothing on its way gives it up.
    Before the first token this commits to status 200; 0: never."""
    write_timeout_s: float = 60.0
    """Seconds for which a client may leave what was written to it unread, or be out of reach without having
    closed, before it counts as gone."""
    deadline_s: float = 600.0
    """Longest a request may take from its acceptance to its last token, seconds."""
    linger_s: float = 0.0
    """Seconds after SIGTERM for which requests are still taken, while /ready says no: time for a load
    balancer to look and to send them elsewhere. Then who connects is refused; a second SIGTERM ends it."""
    drain_limit_s: float = 60.0
    """Longest to wait for running requests after SIGTERM, seconds; then they end with an error."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, int | float):
                continue
            if value < 0 or (value == 0 and item.name not in _MAY_BE_ZERO):
                raise ValueError(f"{item.name} is {value}; a number above 0 is needed")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key are given together or not at all")
        if self.port > 65535:
            raise ValueError(f"port is {self.port}; at most 65535 is possible")
