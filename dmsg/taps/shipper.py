"""``twistd dmsg-shipper``: brings finished files of event logs to where they are collected."""

from __future__ import annotations

import atexit
import os
import time
from typing import Any

import dmsg
from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.schema import ServerStarted, ServerStopped
from dmsg.ops.config import check_values
from dmsg.sansio.backoff import Backoff
from dmsg.sansio.jitter import Jitter
from dmsg.shipping.destinations import check_target, local_path, open_destination, parse_options
from dmsg.shipping.plan import Plan, redact
from dmsg.shipping.shipper import Shipper, ShipperConfig, in_daemon_thread
from dmsg.taps._options import RoleOptions
from dmsg.taps._service import RoleService, leave
from dmsg.taps.settings import ShipperSettings, Verify


class Options(RoleOptions):
    """Options of ``twistd dmsg-shipper``."""

    synopsis = "--from DIR --to URL [options]"
    longdesc = "A shipper: brings finished files of event logs to a directory, an object store or HDFS."
    tap_name = "dmsg-shipper"
    role = "shipper"
    settings_class = ShipperSettings

    def opt_option(self, value: str) -> None:
        """Storage option of fsspec: name=value; may be repeated"""
        self["option"] = " ".join(filter(None, (self["option"], value)))


class ShipperService(RoleService):
    """A shipper with its event log and metrics, as a Twisted service."""

    tap_name = "dmsg-shipper"
    role = "shipper"
    settings: ShipperSettings

    def __init__(self, reactor: Any, settings: ShipperSettings) -> None:
        check_values(settings)  # without a pause the shipper would keep a core busy
        self._source = str(settings.source)
        self._target = local_path(settings.target) or settings.target
        self._options = parse_options(settings.option)
        check_target(self._target, self._source, self._options)
        super().__init__(reactor, settings, node="shipper", listen=None)
        #: The shipper itself, set at the start.
        self.shipper: Shipper | None = None

    def start_role(self) -> None:
        """Look for files and ship them (only now: a daemon has forked, and threads do not survive that)."""
        settings = self.settings
        plan = Plan(
            parallel=settings.parallel,
            backoff=Backoff(limit_s=settings.retry_limit_s),
            uniform=Jitter(os.urandom).random,
            give_up_after=max(1, settings.attempts) if settings.once else None,
        )
        self.shipper = Shipper(
            self.reactor,
            self._source,
            open_destination(self._target, self._options, read_back=settings.verify is Verify.READ, random=os.urandom),
            plan=plan,
            in_thread=in_daemon_thread(self.reactor),
            unix_time=time.time,
            events=self.events,
            config=ShipperConfig(poll_s=settings.poll_s, keep=settings.keep, once=settings.once),
        )
        self.emit(ServerStarted("", "", dmsg.__version__))
        self.shipper.done.addCallback(self._done)
        self.reactor.callWhenRunning(self.shipper.start)

    async def stop_role(self) -> None:
        """Begin nothing more; let uploads under way finish, and abandon those that take longer than they may."""
        if self.shipper is None:
            return
        self.shipper.stop()
        await self.shipper.when_none_in_flight(self.settings.drain_timeout)
        reason = Reason.UPLOADS_ABANDONED if self.shipper.in_flight else Reason.STOPPED
        if self.settings.once and not self.shipper.done.called:
            atexit.register(leave, 1)
        self.emit(ServerStopped(reason, self.reactor.seconds() - self.started_at))

    def readiness(self) -> str:
        """Not ready while the last attempt failed, or the directory cannot be read."""
        return "starting" if self.shipper is None else self.shipper.problem

    def gauges(self) -> dict[str, float]:
        """Backlog, its age, and what happened in this run."""
        return {} if self.shipper is None else self.shipper.gauges()

    def where(self) -> str:
        """From where to where."""
        return f"from {self._source} to {redact(self._target)}"

    def _done(self, ok: bool) -> None:
        if not ok:
            atexit.register(leave, 1)
        self.reactor.stop()


def makeService(options: Options) -> ShipperService:
    """The service for parsed options; an error raises ``SystemExit`` with one line."""
    from twisted.internet import reactor

    return options.build(lambda: ShipperService(reactor, options.settings))
