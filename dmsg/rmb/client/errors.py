"""The errors of calls, and of other messages that could not be sent. All data is in attributes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dmsg.errors import DmsgError
from dmsg.eventlog.reasons import Reason
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.errors import PeerCode


class CallError(DmsgError):
    """Base of the errors of a call. ``target`` is who was called; ``code`` and ``message`` go to a program that asked over
    Redis, ``reason`` is for the log.
    """

    code: int = PeerCode.OTHER
    reason = Reason.OTHER

    def __init__(self, target: SessionAddress, text: str) -> None:
        super().__init__(f"call of twin {target}: {text}")
        self.target = target
        self.text = text

    @property
    def message(self) -> str:
        """The text for other programs. With the code of several problems it begins as the public peer's do."""
        return f"other: {self.text}" if self.code == PeerCode.OTHER else self.text


class CallTimeout(CallError):
    """No answer in time. ``relays`` are the URLs of the relays over which the request was sent, in order.

    ``refused`` are the reasons why answers were not accepted; usually it is empty.
    """

    code = PeerCode.INVALID
    reason = Reason.TIMEOUT

    def __init__(
        self, target: SessionAddress, timeout_s: float, relays: tuple[str, ...], refused: tuple[str, ...]
    ) -> None:
        text = f"no answer within {timeout_s:g} s"
        if refused:
            text += f" ({', '.join(refused)})"
        super().__init__(target, text)
        self.timeout_s = timeout_s
        self.relays = relays
        self.refused = refused


class NotConnected(CallError):
    """The request could not be sent to any relay in time."""

    reason = Reason.NOT_CONNECTED

    def __init__(self, target: SessionAddress, problems: Mapping[str, str]) -> None:
        self._problems = dict(problems)
        what = "; ".join(f"{url}: {problem}" for url, problem in problems.items())
        super().__init__(target, f"no relay has taken the request ({what})")

    @property
    def problems(self) -> Mapping[str, str]:
        """The problem of each relay, by its URL."""
        return MappingProxyType(self._problems)


class CallRefused(CallError):
    """Answered with an error: ``code`` and ``text`` as the other side gave them.

    ``source`` is the session that answered; twin 0 is a relay, whose errors are not signed. ``timestamp`` (Unix seconds) and
    ``schema`` are those of the answer.
    """

    reason = Reason.ANSWERED_WITH_ERROR

    def __init__(
        self,
        target: SessionAddress,
        code: int,
        text: str,
        source: SessionAddress,
        *,
        timestamp: int = 0,
        schema: str | None = None,
    ) -> None:
        super().__init__(target, f"refused with code {code}: {text}")
        self.code = code
        self.text = text
        self.source = source
        self.timestamp = timestamp
        self.schema = schema

    @property
    def message(self) -> str:
        """The text as the other side gave it."""
        return self.text

    @property
    def own_text(self) -> str:
        """The message without the other side's text."""
        return f"call of twin {self.target.twin}: refused with code {self.code}"


class TwinUnknown(CallError):
    """The registry has no such twin."""

    code = PeerCode.UNKNOWN_TWIN
    reason = Reason.UNKNOWN_TWIN

    def __init__(self, target: SessionAddress) -> None:
        super().__init__(target, f"unknown twin id '{target.twin}'")


class RegistryFailed(CallError):
    """The registry could not be asked. ``problem`` says why."""

    reason = Reason.REGISTRY_FAILED

    def __init__(self, target: SessionAddress, problem: str) -> None:
        super().__init__(target, f"failed to get twin information: {problem}")
        self.problem = problem


class NoEncryptionKey(CallError):
    """The registry has no key of the other twin (or, with ``ours``, of our own twin), and plain text is not allowed."""

    code = PeerCode.ENCRYPTION
    reason = Reason.NO_PUBLIC_KEY

    def __init__(self, target: SessionAddress, *, ours: bool) -> None:
        whose = "our twin" if ours else "the twin"
        super().__init__(target, f"e2e error: {whose} has no public key in the registry, and plain text is not allowed")
        self.ours = ours


class EncryptionFailed(CallError):
    """The other twin's key is not a valid key. ``problem`` says why."""

    code = PeerCode.ENCRYPTION

    def __init__(self, target: SessionAddress, problem: str) -> None:
        super().__init__(target, f"e2e error: {problem}")
        self.problem = problem


class EnvelopeTooLarge(CallError):
    """An envelope of ``size_bytes``, more than relays accept."""

    reason = Reason.MESSAGE_OVER_LIMIT

    def __init__(self, target: SessionAddress, size_bytes: int) -> None:
        super().__init__(target, f"an envelope of {size_bytes} bytes is too large")
        self.size_bytes = size_bytes


class TooMuchUnderWay(CallError):
    """The client has reached its limit of calls under way, or of bytes of calls or answers."""

    code = PeerCode.BUSY
    reason = Reason.BUSY

    def __init__(self, target: SessionAddress) -> None:
        super().__init__(target, "too much is under way already")


class Stopped(CallError):
    """The client is not running, or was stopped during the call. ``sent`` says whether a relay may have the request."""

    reason = Reason.STOPPED

    def __init__(self, target: SessionAddress, *, sent: bool = False) -> None:
        super().__init__(target, "the client is stopped")
        self.sent = sent


class NoTwin(DmsgError):
    """The registry knows no twin with the client's own key."""

    def __init__(self) -> None:
        super().__init__("no twin found in the registry with the given key")


class Refusal(DmsgError):
    """Raised by a handler to answer with an error: ``code`` and ``text`` go to the caller as they are, unencrypted.

    A ``code`` is a number from 0 to 2**32 - 1; with any other one the command counts as failed.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text
