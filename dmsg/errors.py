"""The base classes of all errors, and the errors that every slice shares. Pure.

Each slice has its own in a module of that name (``dmsg/*/errors.py``). All data of an error is in attributes; the message
is only for people. Twisted's own reasons (``ConnectionDone``, ``ConnectionLost``) are joined to these where a transport
ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final


def _again(kind: type[BaseException], args: tuple[object, ...]) -> BaseException:
    error = kind.__new__(kind)
    error.args = args
    return error


class DmsgError(Exception):
    """Base of every error the package raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        """A copy or a pickle has the text and the attributes. Exceptions call ``__init__`` with the text alone for one."""
        return _again, (type(self), self.args), self.__dict__

    @property
    def own_text(self) -> str:
        """What happened, for a log: without a word that another side said."""
        return str(self)


class InvalidAddress(DmsgError, ValueError):
    """A text that is not ``host:port``, ``pk@host:port`` or a dmsg address."""


class ConfigError(DmsgError, ValueError):
    """A setting that is unknown, malformed or contradicts another.

    ``option`` names it, ``source`` says where it stood.
    """

    def __init__(self, option: str, problem: str, source: str = "") -> None:
        super().__init__(f"{option}: {problem}" + (f" (in {source})" if source else ""))
        self.option = option
        self.problem = problem
        self.source = source


class LocalProtocolError(DmsgError):
    """Our own program asked for something the state of the protocol does not allow (a bug on this side)."""


class RemoteProtocolError(DmsgError):
    """The other side broke the protocol; the connection that brought it is dropped.

    ``stage`` is where (``handshake``, ``record``, ``frame``, ``transport``), ``reason`` a short fixed text for logs and
    metrics; nothing the other side sent is part of it. ``events`` are what the core had found out before, in the bytes
    of the same read: they have happened and are to be acted on.
    """

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(f"{stage}: {reason}")
        self.stage = stage
        self.reason = reason
        self.events: Sequence[object] = ()


class StageError(DmsgError):
    """A step towards a peer failed: ``stage`` and ``reason`` as in :class:`Attempt`, ``error`` what it came from."""

    def __init__(self, stage: str, reason: str, error: BaseException | None = None) -> None:
        super().__init__(f"{stage}: {reason}")
        self.stage = stage
        self.reason = reason
        self.error = error


@dataclass(frozen=True, slots=True)
class Attempt:
    """One step on the way to a peer and how it ended.

    ``stage`` is ``discovery``, ``connect``, ``handshake``, ``request`` or ``accept``; ``server`` the hex key of the
    relay (empty for discovery); ``elapsed_ms`` counts from the start of the dial; ``reason`` is a short fixed text and
    ``error`` the exception it came from, if any.
    """

    stage: str
    server: str
    elapsed_ms: float
    reason: str
    error: BaseException | None = field(default=None, compare=False)

    def adds_to_reason(self, text: str) -> bool:
        """Whether ``text`` says more than stage and reason do: ``unknown peer`` does not beside ``unknown_peer``."""
        return text.removeprefix(f"{self.stage}: ").replace(" ", "_") != self.reason.replace(" ", "_")

    def as_dict(self) -> dict[str, object]:
        """A JSON-ready form, as the event log and ``dmsg --json`` print it."""
        return {
            "stage": self.stage,
            "server": self.server,
            "elapsed_ms": round(self.elapsed_ms, 3),
            "reason": self.reason,
            "detail": str(self.error) if self.error is not None else "",
        }


#: Reasons of attempts whose relay did not lead to the peer, and of those whose entry named no relay.
_NOT_THERE: Final = frozenset(
    {"unknown_peer", "peer_gone", "server_draining", "server connection lost", "no common server"}
)


class DialError(DmsgError):
    """A dial that failed, with everything that was tried: ``target`` (hex key) and the tree of ``attempts``."""

    def __init__(self, target: str, attempts: Sequence[Attempt]) -> None:
        self.target = target
        self.attempts = tuple(attempts)
        lines = [f"could not reach {target}"]
        for one in self.attempts:
            where = f" via {one.server[:12]}…" if one.server else ""
            detail = f" ({one.error})" if one.error is not None and one.adds_to_reason(str(one.error)) else ""
            lines.append(f"  {one.stage}{where}: {one.reason}{detail} after {one.elapsed_ms:.0f} ms")
        super().__init__("\n".join(lines))

    @property
    def reason(self) -> str:
        """The reason of the attempt that got furthest: what a person wants to read first."""
        order = ("discovery", "connect", "handshake", "request", "accept")
        best = max(self.attempts, key=lambda a: order.index(a.stage) if a.stage in order else -1, default=None)
        return best.reason if best else "no attempt was made"

    @property
    def may_have_moved(self) -> bool:
        """Whether a relay of the peer's entry could not be reached, did not know the peer, or was lost meanwhile, or the
        entry names none: one that changes relays says so if that takes it a moment.
        """
        return any(one.stage in ("connect", "handshake") or one.reason in _NOT_THERE for one in self.attempts)

    @property
    def is_unanswered(self) -> bool:
        """Whether discovery had no answer in time, so that it is not known where the peer is now."""
        return any((one.stage, one.reason) == ("discovery", "unavailable") for one in self.attempts)
