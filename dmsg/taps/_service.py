"""The parts of every role's service: endpoints bound early, the event log, the admin site, an orderly end."""

from __future__ import annotations

import atexit
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import Deferred, ensureDeferred, maybeDeferred
from twisted.internet.interfaces import IListeningPort, IProtocolFactory, IStreamServerEndpoint
from twisted.internet.threads import deferToThreadPool
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.errors import ConfigError, DmsgError
from dmsg.eventlog.files import ROTATE_BYTES
from dmsg.eventlog.limit import LimitedEventLog
from dmsg.eventlog.log import EventLog, NullEventLog, check_directory, new_boot_id
from dmsg.eventlog.schema import Event
from dmsg.glue.listening import LateFactory, listen_problem, server_endpoint, stop_listening
from dmsg.ops.admin import admin_pages, make_admin_site
from dmsg.ops.descriptors import allow_descriptors, be_calm_without_descriptors
from dmsg.ops.gc import GC_THRESHOLDS, settle_memory
from dmsg.ops.metrics import CollectorRegistry, MetricsEventLog, add_gauges
from dmsg.taps._signals import end_well_on_signals, note_signals
from dmsg.taps.settings import CommonSettings

_log = Logger()


@implementer(IStreamServerEndpoint)
class BoundEndpoint:
    """An endpoint whose port is taken by :meth:`bind`, before privileges are dropped, and used by :meth:`listen` later.

    ``text`` is the string of a Twisted server endpoint; another text raises ``ConfigError``.
    """

    def __init__(self, reactor: Any, option: str, text: str) -> None:
        self.text = text
        self._option = option
        self._factory = LateFactory(option)
        self._port: Deferred[IListeningPort] | None = None
        self._failed: list[Failure] = []
        try:
            self._endpoint = server_endpoint(reactor, text)
        except Exception as error:  # every parser has its own
            raise ConfigError(option, f"{text!r} is no endpoint to listen on: {listen_problem(error)}") from None

    def bind(self) -> None:
        """Take the port. Raises ``ConfigError`` if it is known at once that this fails."""
        if self._port is not None:
            return
        self._port = maybeDeferred(self._endpoint.listen, self._factory)
        self._port.addErrback(self._failed.append)
        if self._failed:
            raise self._error()

    def _error(self) -> ConfigError:
        return ConfigError(self._option, f"cannot listen on {self.text}: {listen_problem(self._failed[0].value)}")

    def listen(self, protocolFactory: IProtocolFactory) -> Deferred[IListeningPort]:
        """Serve with ``protocolFactory`` from now on; fires with the port, or with a ``ConfigError``."""
        self.bind()
        self._factory.serve(protocolFactory)
        given: Deferred[IListeningPort] = Deferred()
        assert self._port is not None

        def give(port: IListeningPort | None) -> IListeningPort | None:
            if port is None:
                given.errback(self._error())
            else:
                given.callback(port)
            return port

        self._port.addCallback(give)
        return given

    async def close(self) -> None:
        """Stop listening. Connections that were accepted go on."""
        if self._port is not None:
            self._port.cancel()  # if it does not listen yet
            port = await self._port
            self._port = None
            if port is not None:
                await stop_listening(port)


class NoEndpoint(BoundEndpoint):
    """For a role that does not listen: there is nothing to bind."""

    def __init__(self) -> None:
        self.text = "no endpoint"

    def bind(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""


class _Events:
    """Where a role's events go: nowhere, standard output or a directory; counted if there is an admin site."""

    def __init__(self, reactor: Any, settings: CommonSettings, role: str, node: str, *, counted: bool) -> None:
        boot = new_boot_id(os.urandom)
        self.log: EventLog | NullEventLog
        self._directory: str | None = None
        if settings.events is None:
            self.log = NullEventLog()
        elif settings.events == "-":
            self.log = EventLog.to_stream(sys.stdout, role=role, node=node, boot=boot)
        else:
            if settings.events_limit < 0:
                raise ConfigError("events_limit", "must not be negative")
            if settings.events_rotate_bytes > ROTATE_BYTES:  # the log pipeline does not read a longer one
                raise ConfigError("events_rotate_bytes", f"must be at most {ROTATE_BYTES}")
            self._directory = os.path.abspath(settings.events)
            self.log = EventLog.to_directory(
                self._directory,
                role=role,
                node=node,
                boot=boot,
                rotate_bytes=settings.events_rotate_bytes,
                rotate_s=settings.events_rotate_s,
                limit_bytes=settings.events_limit,
            )
        self.registry = CollectorRegistry()
        #: Metrics count every event; the log limits the rate of lines that strangers cause.
        self.limited = LimitedEventLog(self.log, reactor)
        self.sink = MetricsEventLog(self.limited, self.registry) if counted else self.limited

    def start(self) -> None:
        """Start writing; a directory that cannot be written to raises ``ConfigError``. Only now, as the user that a daemon runs
        as: a directory made earlier would belong to root."""
        if self._directory is not None:
            check_directory(self._directory)
        self.log.start()


class RoleService(Service, ABC):
    """Base of the services that ``makeService`` gives to twistd.

    A subclass does the work of its role in :meth:`start_role` and :meth:`stop_role`; ``endpoint`` is its public endpoint,
    ``events`` takes its events. An error at the start ends the program with status 1 and one line.
    """

    #: Name of the plugin; messages begin with it.
    tap_name = ""
    #: Its name in the event log and in names of metrics: "server" for relays of any protocol.
    role = ""
    #: Thresholds of the garbage collector (:mod:`dmsg.ops.gc`).
    gc_thresholds = GC_THRESHOLDS

    def __init__(
        self, reactor: Any, settings: CommonSettings, *, node: str, listen: str | None, public_pages: bool = False
    ) -> None:
        """With ``public_pages`` the role serves metrics itself, beside the admin site."""
        self.reactor = reactor
        self.settings = settings
        self.endpoint = NoEndpoint() if listen is None else BoundEndpoint(reactor, "listen", listen)
        self._admin = BoundEndpoint(reactor, "admin", settings.admin) if settings.admin else None
        self._counted = public_pages or self._admin is not None
        self._events = _Events(reactor, settings, self.role, settings.node or node, counted=self._counted)
        self.events: Any = self._events.sink
        self.started_at = 0.0
        self._failed = False
        self._made_in = os.getpid()

    # --- what a subclass says ----------------------------------------------------------------------------------------

    @abstractmethod
    def start_role(self) -> None:
        """Begin to serve on ``endpoint``, which is bound."""

    @abstractmethod
    async def stop_role(self) -> None:
        """Stop accepting, let work under way finish, and release everything."""

    @abstractmethod
    def readiness(self) -> str | Awaitable[str]:
        """Why the role is not ready; "" if it is."""

    def where(self) -> str:
        """What it works on, for the log line at its start."""
        return f"on {self.endpoint.text}"

    def gauges(self) -> dict[str, float]:
        """Levels read at scrape time, exported as ``dmsg_<role>_<name>``."""
        return {}

    # --- service -----------------------------------------------------------------------------------------------------

    def privilegedStartService(self) -> None:
        """Take the ports, while the program may still have the privileges for that."""
        super().privilegedStartService()  # type: ignore[no-untyped-call]
        self._take_signals()  # not before: twistd sets handlers of its own
        self._or_exit(self._bind)

    def startService(self) -> None:
        """Start the log, then the role, then the admin site."""
        self._take_signals()
        end_when_the_reactor_fails(self.reactor)
        allow_descriptors()
        be_calm_without_descriptors(self.reactor)
        self._or_exit(self._bind)
        super().startService()  # type: ignore[no-untyped-call]
        self.started_at = self.reactor.seconds()
        self._or_exit(self._events.start)
        self._or_exit(self.start_role)
        if self._counted:
            add_gauges(self._events.registry, f"dmsg_{self.role}_", self.gauges)
        if self._admin is not None:
            self._admin.listen(make_admin_site(self._events.registry, self._ready, self.reactor)).addErrback(self.fail)
        self.reactor.callWhenRunning(self._running)

    def stopService(self) -> Deferred[None]:
        """Drain; fires when the last event is written. The admin site answers until then."""
        super().stopService()  # type: ignore[no-untyped-call]
        return ensureDeferred(self._stop())

    async def _stop(self) -> None:
        try:
            await self.stop_role()
        except Exception:  # whatever it was, the last events must still be written
            _log.failure("{name} did not stop well", name=self.tap_name)
        if self._admin is not None:
            await self._admin.close()
        self._events.limited.tell()
        await deferToThreadPool(self.reactor, self.reactor.getThreadPool(), self._events.log.close)

    def fail(self, failure: Failure) -> None:
        """End the program with status 1, and one line for an error of ours, or a traceback. Does nothing if it ends already."""
        if self.running:
            known = failure.check(DmsgError, ValueError) is not None
            _log.critical("{problem}", problem=failure.getErrorMessage() if known else failure.getTraceback())
            atexit.register(leave, 1)
            self._failed = True
            self.reactor.callWhenRunning(self.reactor.stop)

    def _take_signals(self) -> None:
        note_signals(self.reactor)
        end_well_on_signals(self.reactor)

    def _running(self) -> None:
        end_well_on_signals(self.reactor)
        settle_memory(self.gc_thresholds)
        if self._failed:  # at once at its start: the reactor does not stop before this
            return
        _log.info("{name} runs, {where}", name=self.tap_name, where=self.where())

    @property
    def metrics(self) -> CollectorRegistry:
        """The metrics on :meth:`pages` and the admin site; levels of the role itself come from :meth:`gauges`."""
        return self._events.registry

    def pages(self) -> dict[bytes, Any]:
        """The pages of the admin site by name, for a role that serves them itself."""
        return dict(admin_pages(self._events.registry, self._ready, self.reactor))

    def _ready(self) -> str | Awaitable[str]:
        return self.readiness() if self.running else "stopping"

    def _bind(self) -> None:
        self.endpoint.bind()
        if self._admin is not None:
            self._admin.bind()

    def _or_exit(self, step: Callable[[], None]) -> None:
        try:
            step()
        except ConfigError as error:
            if os.getpid() != self._made_in:
                raise  # twistd has forked, and reports only an Exception to the process that waits at the terminal
            raise SystemExit(f"{self.tap_name}: {error}") from None

    def emit(self, event: Event) -> None:
        """Write one event of the role."""
        self.events.emit(event)


def leave(status: int) -> None:
    """End with a status, at exit: twistd itself always ends with 0 when a program ends by itself."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def end_when_the_reactor_fails(reactor: Any) -> None:
    """End the program with status 1 when an error comes out of ``reactor`` itself, as where memory is used up.

    twistd would log it and end with 0, but for the threads of the reactor's pool: the interpreter waits for them at its end, so
    the program would stay for ever, serve nothing, and take no signal. Call this before ``reactor`` runs.
    """
    run = getattr(reactor, "run", None)
    if run is None or hasattr(run, "guarded"):
        return

    def guarded(*arguments: Any, **named: Any) -> None:
        try:
            run(*arguments, **named)
        except BaseException:
            try:
                _log.failure("the program ends: its reactor has failed")
            finally:
                leave(1)

    guarded.guarded = True  # type: ignore[attr-defined]
    reactor.run = guarded
