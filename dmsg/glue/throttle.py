"""Reading no faster than a rate."""

from __future__ import annotations

from twisted.internet.interfaces import IDelayedCall, IReactorTime

from dmsg.glue.shell import Shell


class ReadThrottle:
    """Stops a shell from reading once it has read more than ``bytes_per_s``, for as long as it is ahead.

    One second's worth may come at once.
    """

    _REASON = "bytes_per_s"

    def __init__(self, shell: Shell, clock: IReactorTime, bytes_per_s: float) -> None:
        self._shell = shell
        self._clock = clock
        self._rate = bytes_per_s
        self._credit = bytes_per_s
        self._since = clock.seconds()
        self._call: IDelayedCall | None = None

    def read(self, size: int) -> None:
        """Note ``size`` bytes read."""
        now = self._clock.seconds()
        elapsed = max(0.0, now - self._since)
        self._since = now
        self._credit = min(self._rate, self._credit + elapsed * self._rate) - size
        if self._credit < 0 and self._call is None:
            self._shell.hold(self._REASON, True)
            self._call = self._clock.callLater(-self._credit / self._rate, self._go_on)

    def _go_on(self) -> None:
        self._call = None
        self._shell.hold(self._REASON, False)

    def stop(self) -> None:
        """The connection is gone."""
        if self._call is not None:
            self._call.cancel()
            self._call = None
