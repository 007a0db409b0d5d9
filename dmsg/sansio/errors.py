"""What the other side of a WebSocket, or a Redis, does wrong; all data is in attributes. Pure."""

from __future__ import annotations

from dmsg.errors import RemoteProtocolError

_PROTOCOL_ERROR = 1002  # RFC 6455, section 7.4.1


class WebSocketViolation(RemoteProtocolError):
    """The other side broke the protocol or a limit; ``code`` is what our close frame says."""

    def __init__(self, reason: str, code: int = _PROTOCOL_ERROR) -> None:
        super().__init__("websocket", reason)
        self.code = code


class KeepaliveLost(RemoteProtocolError):
    """Nothing was heard for ``silent_s`` seconds, although we pinged."""

    def __init__(self, silent_s: float) -> None:
        super().__init__("websocket", "keepalive")
        self.silent_s = silent_s


class WebSocketRefused(RemoteProtocolError):
    """The handshake failed: ``status`` and ``text`` are the HTTP answer's.

    At a client they are the server's answer (its text, up to ``REFUSAL_BYTES``; status 101 if it agreed in a wrong way),
    at a server the answer to send.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__("websocket", f"refused with status {status}")
        self.status = status
        self.text = text


class RedisViolation(RemoteProtocolError):
    """Bytes that are no reply, a reply to no command, or no reply in time."""

    def __init__(self, reason: str) -> None:
        super().__init__("redis", reason)
