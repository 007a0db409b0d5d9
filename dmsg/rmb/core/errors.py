"""What the Reliable Message Bus can refuse or fail for; all data is in attributes."""

from __future__ import annotations

from dmsg.errors import RemoteProtocolError


class MalformedEnvelope(RemoteProtocolError):
    """Bytes that are not an envelope: not protobuf, or a text in them that is not UTF-8."""

    def __init__(self) -> None:
        super().__init__("envelope", "malformed")
