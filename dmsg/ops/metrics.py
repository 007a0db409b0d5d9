"""Prometheus metrics, all in a registry of the program's own.

What can be counted from events is counted from events (:class:`MetricsEventLog`), so that protocol code has one seam
only. What is a level (open transports, queued bytes) is read at scrape time from a callable (:func:`add_gauges`). The
owner of prometheus_client; its exporter for Twisted is not used, because importing that installs a reactor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from twisted.logger import Logger
from zope.interface import implementer

from dmsg.eventlog import schema as ev
from dmsg.interfaces import IEventLog

__all__ = ["CONTENT_TYPE_LATEST", "CollectorRegistry", "MetricsEventLog", "add_gauges", "exposition"]

#: Different texts one label may take; more are counted as "other". Reasons are fixed texts, but a mistake there must
#: not make a time series of every text.
LABEL_VALUES: Final = 64
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LIFETIMES: Final = (0.1, 1.0, 10.0, 60.0, 600.0, 3600.0, 21600.0, 86400.0)

_log = Logger()
E = TypeVar("E", bound=ev.Event)


class _Labels:
    """Bounds how many values a label takes."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], set[str]] = {}

    def __call__(self, metric: str, label: str, value: str) -> str:
        seen = self._seen.setdefault((metric, label), set())
        if value not in seen:
            if len(seen) >= LABEL_VALUES:
                return "other"
            seen.add(value)
        return value


@implementer(IEventLog)
class MetricsEventLog:
    """Counts events in ``registry`` and hands them on to ``inner`` (``dropped`` of which is exported too)."""

    def __init__(self, inner: Any, registry: CollectorRegistry) -> None:
        self.inner = inner
        self.registry = registry
        self._label = _Labels()
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        self._make()
        self._actions: dict[type[ev.Event], Callable[[Any], None]] = {
            ev.ConnectionOpened: self._connection_opened,
            ev.ConnectionClosed: self._connection_closed,
            ev.HandshakeFailed: self._handshake_failed,
            ev.TransportOpened: self._transport_opened,
            ev.TransportClosed: self._transport_closed,
            ev.TransportResumed: self._transport_resumed,
            ev.Refused: self._refused,
            ev.DialFinished: self._dial_finished,
            ev.SessionUp: self._session_up,
            ev.SessionDown: self._session_down,
            ev.EntryPublished: self._entry_published,
            ev.DiscoveryRequest: self._discovery_request,
            ev.RanksLoaded: self._ranks_loaded,
            ev.Drained: self._drained,
            ev.FileShipped: self._file_shipped,
        }

    def emit(self, event: ev.Event) -> None:
        """Count one event and hand it on; never raises."""
        action = self._actions.get(type(event))
        if action is not None:
            try:
                action(event)
            except Exception:  # a field of the wrong type is no reason to lose the event, or the connection it is about
                self._counters["dmsg_metrics_errors"].inc()
        self.inner.emit(event)

    # --- declarations ------------------------------------------------------------------------------------------------

    def _make(self) -> None:
        for name, help, labels in _COUNTERS:
            self._counters[name] = Counter(name, help, labels, registry=self.registry)
        for name, help, labels, buckets in _HISTOGRAMS:
            self._histograms[name] = Histogram(name, help, labels, buckets=buckets, registry=self.registry)
        self._draining = Gauge("dmsg_drained", "1 after the server has drained", registry=self.registry)
        add_gauges(self.registry, "dmsg_", self._losses)

    def _losses(self) -> dict[str, float]:
        """What the log itself has lost: events it had no room for, and those in files deleted because of the limit."""
        return {f"events_{what}": getattr(self.inner, what, 0) for what in ("dropped", "discarded")}

    def _count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        counter = self._counters[name]
        if labels:
            counter = counter.labels(**{key: self._label(name, key, value) for key, value in labels.items()})
        counter.inc(amount)

    def _observe(self, name: str, value: float, **labels: str) -> None:
        histogram = self._histograms[name]
        if labels:
            histogram = histogram.labels(**{key: self._label(name, key, one) for key, one in labels.items()})
        histogram.observe(value)

    # --- one method for each event -----------------------------------------------------------------------------------

    def _connection_opened(self, event: ev.ConnectionOpened) -> None:
        self._count("dmsg_connections_opened", extended=_yes(event.extended))
        self._observe("dmsg_handshake_seconds", event.handshake_ms / 1000)

    def _connection_closed(self, event: ev.ConnectionClosed) -> None:
        self._count("dmsg_connections_closed", reason=event.reason)
        self._observe("dmsg_connection_duration_seconds", event.duration_s)
        self._count("dmsg_connection_bytes", event.bytes_in, direction="in")
        self._count("dmsg_connection_bytes", event.bytes_out, direction="out")
        self._count("dmsg_connection_frames", event.frames_in, direction="in")
        self._count("dmsg_connection_frames", event.frames_out, direction="out")

    def _handshake_failed(self, event: ev.HandshakeFailed) -> None:
        self._count("dmsg_handshakes_failed", stage=event.stage, reason=event.reason)

    def _transport_opened(self, event: ev.TransportOpened) -> None:
        self._count("dmsg_transports_opened", security=event.security)
        self._observe("dmsg_transport_accept_seconds", event.accept_ms / 1000)

    def _transport_closed(self, event: ev.TransportClosed) -> None:
        self._count("dmsg_transports_closed", reason=event.reason, by=event.by)
        self._count("dmsg_transport_bytes", event.bytes_in, direction="in")
        self._count("dmsg_transport_bytes", event.bytes_out, direction="out")
        self._observe("dmsg_transport_duration_seconds", event.duration_s)

    def _transport_resumed(self, event: ev.TransportResumed) -> None:
        self._count("dmsg_transports_resumed", reason=event.reason)
        self._observe("dmsg_transport_resume_seconds", event.elapsed_ms / 1000)

    def _refused(self, event: ev.Refused) -> None:
        self._count("dmsg_refusals", event.count, what=event.what, reason=event.reason)

    def _dial_finished(self, event: ev.DialFinished) -> None:
        result = "ok" if event.ok else event.reason or "failed"
        self._count("dmsg_dials", result=result, security=event.security)
        self._observe("dmsg_dial_seconds", event.elapsed_ms / 1000, ok=_yes(event.ok))

    def _session_up(self, event: ev.SessionUp) -> None:
        self._count("dmsg_sessions_up", reason=event.reason)

    def _session_down(self, event: ev.SessionDown) -> None:
        self._count("dmsg_sessions_down", reason=event.reason)

    def _entry_published(self, event: ev.EntryPublished) -> None:
        self._count("dmsg_entry_publications", kind=event.kind, result="ok" if event.ok else event.reason or "failed")

    def _discovery_request(self, event: ev.DiscoveryRequest) -> None:
        status = str(event.status)
        self._count("dmsg_discovery_requests", method=event.method, path=event.path, status=status)
        self._observe("dmsg_discovery_request_seconds", event.elapsed_ms / 1000, method=event.method, path=event.path)

    def _ranks_loaded(self, event: ev.RanksLoaded) -> None:
        self._count("dmsg_ranks_documents", result="ok" if event.ok else event.reason or "failed")

    def _drained(self, event: ev.Drained) -> None:
        self._draining.set(1)

    def _file_shipped(self, event: ev.FileShipped) -> None:
        self._count("dmsg_files_shipped", result="ok" if event.ok else event.reason or "failed")
        self._observe("dmsg_ship_seconds", event.elapsed_ms / 1000, ok=_yes(event.ok))
        if event.ok:
            self._count("dmsg_shipped_bytes", event.bytes)
            self._count("dmsg_shipped_lines", event.lines)


_COUNTERS: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    ("dmsg_connections_opened", "Connections that finished their handshake", ("extended",)),
    ("dmsg_connections_closed", "Connections that ended", ("reason",)),
    ("dmsg_connection_bytes", "Bytes on the sockets of connections that have ended", ("direction",)),
    ("dmsg_connection_frames", "Frames of connections that have ended", ("direction",)),
    ("dmsg_handshakes_failed", "Connections that ended before their handshake did", ("stage", "reason")),
    ("dmsg_transports_opened", "Transports that were accepted", ("security",)),
    ("dmsg_transports_closed", "Transports, and requests for them, that ended", ("reason", "by")),
    ("dmsg_transports_resumed", "Transports that went on over another path", ("reason",)),
    ("dmsg_transport_bytes", "Data bytes of transports that have ended", ("direction",)),
    ("dmsg_refusals", "What clients asked for and did not get", ("what", "reason")),
    ("dmsg_dials", "Dials that ended", ("result", "security")),
    ("dmsg_sessions_up", "Sessions that came up", ("reason",)),
    ("dmsg_sessions_down", "Sessions that went down, or did not come up", ("reason",)),
    ("dmsg_entry_publications", "Entries written to discovery, or not", ("kind", "result")),
    ("dmsg_discovery_requests", "Requests discovery answered", ("method", "path", "status")),
    ("dmsg_ranks_documents", "Documents of relay ranks taken, or refused for a new reason", ("result",)),
    ("dmsg_files_shipped", "Attempts to ship a file of the event log that ended", ("result",)),
    ("dmsg_shipped_bytes", "Bytes of files of the event log that have arrived", ()),
    ("dmsg_shipped_lines", "Lines of files of the event log that have arrived", ()),
    ("dmsg_metrics_errors", "Events that could not be counted", ()),
)
_HISTOGRAMS: Final[tuple[tuple[str, str, tuple[str, ...], tuple[float, ...]], ...]] = (
    ("dmsg_handshake_seconds", "From the TCP connection to the end of its handshake", (), _SECONDS),
    ("dmsg_connection_duration_seconds", "How long connections were open", (), _LIFETIMES),
    ("dmsg_transport_resume_seconds", "How long transports that were resumed had no path", (), _SECONDS),
    ("dmsg_transport_accept_seconds", "From REQUEST to ACCEPT", (), _SECONDS),
    ("dmsg_transport_duration_seconds", "How long transports were open", (), _LIFETIMES),
    ("dmsg_dial_seconds", "How long dials took", ("ok",), _SECONDS),
    ("dmsg_ship_seconds", "How long attempts to ship a file took", ("ok",), _SECONDS),
    ("dmsg_discovery_request_seconds", "How long answers of discovery took", ("method", "path"), _SECONDS),
)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


class _Gauges(Collector):
    """Asks a callable for its numbers whenever the registry is scraped."""

    def __init__(self, prefix: str, read: Callable[[], Mapping[str, float]]) -> None:
        self._prefix = prefix
        self._read = read

    def describe(self) -> list[Any]:
        """Nothing beforehand: the callable need not be ready yet."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One gauge for each number there is now; none if reading fails."""
        try:
            values = dict(self._read())
        except Exception:  # a scrape still gets everything else
            _log.failure("the gauges {prefix}* cannot be read", prefix=self._prefix)
            return
        for name, value in values.items():
            yield GaugeMetricFamily(self._prefix + name, f"Read at scrape time: {name.replace('_', ' ')}", value=value)


def add_gauges(registry: CollectorRegistry, prefix: str, read: Callable[[], Mapping[str, float]]) -> None:
    """Export what ``read()`` gives at each scrape as gauges named ``prefix`` + key."""
    registry.register(_Gauges(prefix, read))


def exposition(registry: CollectorRegistry) -> bytes:
    """Everything in ``registry`` in the text format of :data:`CONTENT_TYPE_LATEST`."""
    return generate_latest(registry)
