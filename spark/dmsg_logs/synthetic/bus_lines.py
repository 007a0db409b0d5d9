"""The columns of lines about the Reliable Message Bus."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from dmsg_logs.synthetic.bus import FIRST_TWIN, STRANGE_RELAY, WAYS, twin_number
from dmsg_logs.synthetic.fleet import End, Ints
from dmsg_logs.synthetic.texts import ATTEMPTS, CALLS, ENDS, FAILURES, Columns
from dmsg_logs.synthetic.timeline import Kind, World

#: Bytes of an envelope.
_ENVELOPE_BYTES: Final = 437


class BusScribe:
    """Makes the columns of these lines; :attr:`makers` has a function for each kind of them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._bus = world.bus
        fleet = world.fleet
        self._hosts = [fleet.nodes[fleet.bus + at].name for at in range(fleet.bus_relays)] + [STRANGE_RELAY]
        self.makers: dict[Kind, Callable[[Ints], Columns]] = {
            Kind.TWIN_OPENED: lambda ref: self._opened(ref, relay=True),
            Kind.TWIN_CLOSED: lambda ref: self._closed(ref, relay=True),
            Kind.RELAY_JOINED: lambda ref: self._opened(ref, relay=False),
            Kind.RELAY_LEFT: lambda ref: self._closed(ref, relay=False),
            Kind.ROUTED: lambda ref: {name: self._bus.routed.amounts[ref, at].tolist() for at, name in enumerate(WAYS)},
            Kind.ENVELOPE_FAILED: self._failed,
            Kind.RATE_LIMITED: lambda ref: {
                "twin": self._bus.limits.whom[ref].tolist(),
                "count": self._bus.limits.count[ref].tolist(),
            },
            Kind.FEDERATED: self._attempted,
            Kind.RANK_CHANGED: lambda ref: {
                "relay": [self._hosts[one] for one in self._bus.ranks.whom[ref].tolist()],
                "failures_per_hour": self._bus.ranks.value[ref].tolist(),
            },
            Kind.CALL: self._called,
        }

    def _who(self, ref: Ints, *, relay: bool) -> dict[str, Any]:
        sessions = self._bus.sessions
        numbers = twin_number(self._world.fleet, sessions.twin[ref])
        names = [f"twin {one}" if one > FIRST_TWIN else None for one in numbers.tolist()]  # the first one has none
        return {
            "conn": (sessions.relay_conn if relay else sessions.twin_conn)[ref].tolist(),
            "twin": numbers.tolist(),
            "connection": ["" if one is None else hashlib.sha256(one.encode()).hexdigest()[:16] for one in names],
        }

    def _opened(self, ref: Ints, *, relay: bool) -> Columns:
        sessions, nodes = self._bus.sessions, self._world.fleet.nodes
        of = [nodes[one] for one in (sessions.twin if relay else sessions.relay)[ref].tolist()]
        return {
            **self._who(ref, relay=relay),
            "address": [one.address if relay else one.name for one in of],
            "handshake_ms": (sessions.handshake_ms[ref] * (1.0 if relay else 1.2)).tolist(),
        }

    def _closed(self, ref: Ints, *, relay: bool) -> Columns:
        sessions = self._bus.sessions
        of_twin, to_twin = sessions.sent[ref], sessions.received[ref]
        came, went = (of_twin, to_twin) if relay else (to_twin, of_twin)
        return {
            **self._who(ref, relay=relay),
            "reason": [ENDS[End(one)][0 if relay else 1] for one in sessions.kind[ref].tolist()],
            "duration_s": (sessions.end - sessions.start)[ref].tolist(),
            "envelopes_in": came.tolist(),
            "envelopes_out": went.tolist(),
            "bytes_in": (came * _ENVELOPE_BYTES).tolist(),
            "bytes_out": (went * _ENVELOPE_BYTES).tolist(),
        }

    def _failed(self, ref: Ints) -> Columns:
        failures = self._bus.failures
        return {
            "twin": failures.whom[ref].tolist(),
            "reason": [FAILURES[one] for one in failures.what[ref].tolist()],
            "count": failures.count[ref].tolist(),
        }

    def _attempted(self, ref: Ints) -> Columns:
        attempts = self._bus.attempts
        return {
            "relay": [self._hosts[one] for one in attempts.whom[ref].tolist()],
            **_end(attempts.what[ref], ATTEMPTS),
            "elapsed_ms": attempts.value[ref].tolist(),
            "count": attempts.count[ref].tolist(),
        }

    def _called(self, ref: Ints) -> Columns:
        calls = self._bus.calls
        several = calls.count[ref] > 1
        return {
            "twin": np.where(several, 0, calls.whom[ref]).tolist(),
            **_end(calls.what[ref], CALLS),
            "elapsed_ms": calls.value[ref].tolist(),
            "count": calls.count[ref].tolist(),
        }


def _end(what: Ints, reasons: tuple[str, ...]) -> dict[str, Any]:
    texts = [reasons[one] for one in what.tolist()]
    return {"ok": ["false" if text else "true" for text in texts], "reason": texts}
