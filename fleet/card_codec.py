"""A worker's card as JSON, as it stands in the registry. Pure."""

from __future__ import annotations

import msgspec

from fleet.member import WorkerCard

_decoder = msgspec.json.Decoder(WorkerCard)


def encode_card(card: WorkerCard) -> bytes:
    return msgspec.json.encode(card)


def decode_card(data: bytes, key: str = "") -> WorkerCard:
    """The card; fields of a newer version are ignored. ValueError names the key and the field."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"not a worker's card{f' at {key}' if key else ''}: {error}") from None
