"""The contract between a pure core and the shell that drives it.

Bytes in, events out, bytes out. A core has no callbacks, no clock and no log; only
:class:`~dmsg.errors.RemoteProtocolError` may leave ``receive_data`` and ``handle_timeout``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol


class Core(Protocol):
    """What :class:`dmsg.glue.shell.Shell` can drive. Times are seconds on the clock of the caller.

    A core inherits from this class. The defaults of :meth:`pause`, :meth:`resume` and :attr:`overloaded` take no part in
    flow control; those of :meth:`next_timeout` and :meth:`handle_timeout` set no timer.
    """

    __slots__ = ()

    #: Whether :meth:`receive_data` also accepts views of a buffer that the next read overwrites, with many records at a time.
    takes_views: ClassVar[bool] = False

    def receive_data(self, data: bytes, now: float) -> Sequence[object]:
        """Take bytes from the network and return the events in them.

        ``RemoteProtocolError`` ends the connection; its ``events`` are those before the fault.
        """

    def data_to_send(self) -> bytes:
        """The bytes to write now. The shell does not ask while the network takes nothing.

        ``LocalProtocolError`` ends the connection: it can encrypt nothing more.
        """

    def next_timeout(self) -> float | None:
        """When to call ``handle_timeout`` next; ``None`` for never."""
        return None

    def handle_timeout(self, now: float) -> Sequence[object]:
        """Do what is due at ``now``."""
        return ()

    def pause(self) -> None:
        """The network takes nothing more for now."""
        return

    def resume(self) -> None:
        """The network takes again."""
        return

    @property
    def overloaded(self) -> bool:
        """Whether reading should stop until the queue has been sent."""
        return False
