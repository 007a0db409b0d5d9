"""Prometheus metrics, all in a registry of the program's own.

Counters and histograms come from events (:class:`MetricsEventLog`), so that protocol code reports to one interface only.
Levels (open transports, queued bytes) are read at scrape time from a callable (:func:`add_gauges`). This module owns
prometheus_client; its exporter for Twisted is not used, because importing that installs a reactor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
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

#: Different texts that one label may have; more are counted as "other". Reasons are fixed texts, but a mistake must not make a
#: time series of every text.
LABEL_VALUES: Final = 64
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LIFETIMES: Final = (0.1, 1.0, 10.0, 60.0, 600.0, 3600.0, 21600.0, 86400.0)

_log = Logger()
E = TypeVar("E", bound=ev.Event)


class _Labels:
    """Limits how many values a label has."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], set[str]] = {}
        #: Values by label that are never "other".
        self.named: dict[str, Collection[str]] = {}

    def __call__(self, metric: str, label: str, value: str) -> str:
        seen = self._seen.setdefault((metric, label), set())
        if value not in seen and value not in self.named.get(label, ()):
            if len(seen) >= LABEL_VALUES:
                return "other"
            seen.add(value)
        return value


@implementer(IEventLog)
class MetricsEventLog:
    """Counts events in ``registry`` and passes them on to ``inner``, whose ``dropped`` and ``discarded`` are exported, too."""

    def __init__(self, inner: Any, registry: CollectorRegistry) -> None:
        self.inner = inner
        self.registry = registry
        self._label = _Labels()
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        for name, help, labels in _COUNTERS:
            self._counters[name] = Counter(name, help, labels, registry=registry)
        for name, help, labels, buckets in _HISTOGRAMS:
            self._histograms[name] = Histogram(name, help, labels, buckets=buckets, registry=registry)
        self._draining = Gauge("dmsg_drained", "1 after the server has drained", registry=registry)
        add_gauges(registry, "dmsg_", self._losses)

    def name_always(self, label: str, values: Collection[str]) -> None:
        """Count ``values`` of ``label`` under their own names, however many others strangers make up."""
        self._label.named[label] = values

    def emit(self, event: ev.Event) -> None:
        """Count one event and pass it on; never raises."""
        try:
            self._note(event)
        except Exception:  # a field of the wrong type is no reason to lose the event, or the connection it is about
            self._counters["dmsg_metrics_errors"].inc()
        self.inner.emit(event)

    def _losses(self) -> dict[str, float]:
        """The losses of the log itself: events it had no room for, and events in files deleted because of the limit."""
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

    # --- what is counted of each event -------------------------------------------------------------------------------

    def _note(self, event: ev.Event) -> None:
        match event:
            case ev.ConnectionOpened():
                self._count("dmsg_connections_opened", extended=_yes(event.extended))
                self._observe("dmsg_handshake_seconds", event.handshake_ms / 1000)
            case ev.ConnectionClosed():
                self._count("dmsg_connections_closed", reason=event.reason)
                self._observe("dmsg_connection_duration_seconds", event.duration_s)
                self._count("dmsg_connection_bytes", event.bytes_in, direction="in")
                self._count("dmsg_connection_bytes", event.bytes_out, direction="out")
                self._count("dmsg_connection_frames", event.frames_in, direction="in")
                self._count("dmsg_connection_frames", event.frames_out, direction="out")
            case ev.HandshakeFailed():
                self._count("dmsg_handshakes_failed", stage=event.stage, reason=event.reason)
            case ev.TransportOpened():
                self._count("dmsg_transports_opened", security=event.security)
                self._observe("dmsg_transport_accept_seconds", event.accept_ms / 1000)
            case ev.TransportClosed():
                self._count("dmsg_transports_closed", reason=event.reason, by=event.by)
                self._count("dmsg_transport_bytes", event.bytes_in, direction="in")
                self._count("dmsg_transport_bytes", event.bytes_out, direction="out")
                self._observe("dmsg_transport_duration_seconds", event.duration_s)
            case ev.TransportResumed():
                self._count("dmsg_transports_resumed", reason=event.reason)
                self._observe("dmsg_transport_resume_seconds", event.elapsed_ms / 1000)
            case ev.Refused():
                self._count("dmsg_refusals", event.count, what=event.what, reason=event.reason)
            case ev.DialFinished():
                self._count("dmsg_dials", result=_result(event), security=event.security)
                self._observe("dmsg_dial_seconds", event.elapsed_ms / 1000, ok=_yes(event.ok))
            case ev.SessionUp():
                self._count("dmsg_sessions_up", reason=event.reason)
            case ev.SessionDown():
                self._count("dmsg_sessions_down", reason=event.reason)
            case ev.EntryPublished():
                self._count("dmsg_entry_publications", kind=event.kind, result=_result(event))
            case ev.DiscoveryRequest():
                status = str(event.status)
                self._count("dmsg_discovery_requests", method=event.method, path=event.path, status=status)
                self._observe(
                    "dmsg_discovery_request_seconds", event.elapsed_ms / 1000, method=event.method, path=event.path
                )
            case ev.RanksLoaded():
                self._count("dmsg_ranks_documents", result=_result(event))
            case ev.TwinSessionOpened():
                self._count("dmsg_rmb_sessions_opened")
                self._observe("dmsg_rmb_handshake_seconds", event.handshake_ms / 1000)
            case ev.TwinSessionClosed():
                self._count("dmsg_rmb_sessions_closed", reason=event.reason)
                self._observe("dmsg_rmb_session_duration_seconds", event.duration_s)
            case ev.EnvelopesRouted():
                for way in _WAYS:
                    self._count("dmsg_rmb_envelopes", getattr(event, way), way=way)
                self._count("dmsg_rmb_envelope_bytes", event.bytes)
            case ev.EnvelopeFailed():
                self._count("dmsg_rmb_envelopes_failed", event.count, reason=event.reason)
            case ev.RateLimited():
                self._count("dmsg_rmb_rate_limited", event.count)
            case ev.FederationAttempted():
                self._count("dmsg_rmb_federation_attempts", event.count, relay=event.relay, result=_result(event))
                self._observe("dmsg_rmb_federation_seconds", event.elapsed_ms / 1000, ok=_yes(event.ok))
            case ev.RelayRankChanged():
                self._count("dmsg_rmb_rank_changes", relay=event.relay)
            case ev.CallFinished():
                self._count("dmsg_rmb_calls", event.count, result=_result(event))
                self._observe("dmsg_rmb_call_seconds", event.elapsed_ms / 1000, ok=_yes(event.ok))
            case ev.Drained():
                self._draining.set(1)
            case ev.FileShipped():
                self._count("dmsg_files_shipped", result=_result(event))
                self._observe("dmsg_ship_seconds", event.elapsed_ms / 1000, ok=_yes(event.ok))
                if event.ok:
                    self._count("dmsg_shipped_bytes", event.bytes)
                    self._count("dmsg_shipped_lines", event.lines)


#: Columns of ``envelopes_routed`` that are values of the label ``way``.
_WAYS: Final = ("received", "ingested", "local", "stored", "fetched", "federated", "expired", "refused")

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
    ("dmsg_rmb_sessions_opened", "Sessions of twins that came up", ()),
    ("dmsg_rmb_sessions_closed", "Sessions of twins that ended, or did not come up", ("reason",)),
    ("dmsg_rmb_envelopes", "What a relay did with envelopes, counted every 10 s", ("way",)),
    ("dmsg_rmb_envelope_bytes", "Bytes of the envelopes a relay took, counted every 10 s", ()),
    ("dmsg_rmb_envelopes_failed", "Envelopes that went nowhere", ("reason",)),
    ("dmsg_rmb_rate_limited", "Envelopes dropped because their twin sends too many", ()),
    ("dmsg_rmb_federation_attempts", "Envelopes posted to other relays, or not", ("relay", "result")),
    ("dmsg_rmb_rank_changes", "Changes of the rate of failures of other relays", ("relay",)),
    ("dmsg_rmb_calls", "Calls of other twins that ended", ("result",)),
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
    ("dmsg_rmb_handshake_seconds", "From the TCP connection to the session of a twin", (), _SECONDS),
    ("dmsg_rmb_session_duration_seconds", "How long sessions of twins were up", (), _LIFETIMES),
    ("dmsg_rmb_federation_seconds", "How long posts to other relays took", ("ok",), _SECONDS),
    ("dmsg_rmb_call_seconds", "How long calls of other twins took", ("ok",), _SECONDS),
    ("dmsg_ship_seconds", "How long attempts to ship a file took", ("ok",), _SECONDS),
    ("dmsg_discovery_request_seconds", "How long answers of discovery took", ("method", "path"), _SECONDS),
)


def _result(
    event: ev.DialFinished
    | ev.EntryPublished
    | ev.RanksLoaded
    | ev.FileShipped
    | ev.FederationAttempted
    | ev.CallFinished,
) -> str:
    return "ok" if event.ok else event.reason or "failed"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


class _Gauges(Collector):
    """Asks a callable for its numbers whenever the registry is scraped."""

    def __init__(self, prefix: str, read: Callable[[], Mapping[str, float]]) -> None:
        self._prefix = prefix
        self._read = read

    def describe(self) -> list[Any]:
        """Nothing in advance: the callable need not be ready yet."""
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
