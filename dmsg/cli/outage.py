"""An outage of a command that listens: it has lost all its servers, and no peer reaches it."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any, Final

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall

from dmsg.cli.exits import CommandError, Exit
from dmsg.cli.output import Output, tell_failed

#: Seconds between two looks at the sessions. A client that has had none at two looks counts as cut off: most find another
#: server in less.
LOOK_S: Final = 5.0


class OutageWatch:
    """Tells when ``sessions`` has been empty for a while, once, and when it is not any more.

    ``last_failure()`` returns the key and the reason of the session that was lost, or could not be made, last.
    """

    def __init__(
        self, sessions: Sized, last_failure: Callable[[], tuple[str, str] | None], out: Output, clock: IReactorTime
    ) -> None:
        self._sessions = sessions
        self._last_failure = last_failure
        self._out = out
        self._empty_looks = 0
        self._looking = LoopingCall(self._look)
        self._looking.clock = clock

    def start(self) -> None:
        """Look from now on."""
        self._looking.start(LOOK_S, now=False)

    def stop(self) -> None:
        """Look no more."""
        if self._looking.running:  # not after an output that cannot be written
            self._looking.stop()

    def _look(self) -> None:
        is_told = self._empty_looks > 1
        self._empty_looks = 0 if self._sessions else self._empty_looks + 1
        if self._empty_looks == 2:
            self._tell_outage()
        elif is_told and not self._empty_looks:
            self._out.result({"event": "connected"})
            self._out.note("a server is connected again")

    def _tell_outage(self) -> None:
        data: dict[str, Any] = {}
        text = "no server is connected any more"
        if (failure := self._last_failure()) is not None:
            server, reason = failure
            data = {"server": server, "reason": reason}
            text += f": {server[:12]}… {reason}"
        tell_failed(self._out, CommandError(text, Exit.UNREACHABLE, data), text)
