"""The non-empty tables of relays and clients by name: at rest all of them are empty."""

from __future__ import annotations

from typing import Final

from dmsg.messaging.client.service import MessagingClient
from dmsg.mux.client.service import DmsgClient
from dmsg.serving.service import RelayService
from tests.simulation import tables

Client = DmsgClient | MessagingClient

#: Tables that a service keeps even after it has stopped: each has a limit of its own, or one entry for each relay.
_REMEMBERED: Final = {
    "Backpressure._held_bytes": "a limit, in fact",
    "ClientRecord._seen": "the relays that there was a session with",
    "EntryKeeper._signatures": "posts that may yet be found in discovery; limited",
    "EntryRegistrar.keepers": "one for each kind of entry, from the beginning",
    "FairBucket._debts": "what sources have used up of a rate; paid off with time",
    "RateLimiterTable._buckets": "what addresses have used up of their rates",
    "RelayScores._measured": "how far relays are",
    "RelayScores._places": "how relays are ranked",
    "SessionGoal._learned": "the relays that discovery listed",
    "Whereabouts._found": "where relays were that dials led to",
    "SessionPool._failures": "when relays failed last",
    "_Pins._newest": "how new the entries were that were looked up last; limited",
    "_Table._things": "the entries that were looked up last",
}
#: Further tables of a running service.
_RUNNING: Final = _REMEMBERED | {
    "Connection._late_ids": "transports that ended and whose frames may still come; limited",
    "Crowd._addresses": "the clients that are there",
    "Crowd._holders": "the clients that are there",
    "Crowd._places": "the clients that are there",
    "DmsgClient._noted": "the sessions that are there",
    "EntryRegistrar._publishers": "the program itself",
    "LinkSession._here": "an address for each service",
    "Member.late": "ids of requests that are over and that the client may still answer; limited",
    "Member.pairs": "rates towards clients that do not know this one; limited",
    "MessagingClient._noted": "the sessions that are there",
    "Openings._paths": "what was learned of the ways to the peers that were spoken to last; limited",
    "PathWindow._rates": "how much went through a path of late",
    "RecentIds._count": "ids that were used; limited",
    "RecentIds._newer": "ids that were used; limited",
    "RecentIds._older": "ids that were used; limited",
    "RecentSet._items": "keys that were accepted last; limited",
    "RelayService._shells": "the clients that are there",
    "RequestRates._sources": "clients that are there and have asked",
    "RequestRates._targets": "clients that are there and were asked for",
    "ServerSession._here": "an address for each service",
    "Services._ports": "what the program listens on",
    "SessionPool._addresses": "the sessions that are there",
    "SessionPool._led_to": "sessions that dials have made; a few are kept",
    "SessionPool.sessions": "the sessions that are there",
    "Switch.members": "the clients that are there",
    "Tally._counts": "the clients that are there",
    "Tally._levels": "the clients that are there",
    "sessions_change._waiting": "the program waits for more relays than there are",
}


def of_relay(relay: RelayService) -> dict[str, int]:
    """Data that ``relay`` holds for transports and strangers; its clients may be connected."""
    switch, admission = relay.switch, relay.admission
    members = switch.members.values()
    return _some(
        {
            "transports": switch.open_transports,
            "queued bytes": switch.queued_bytes,
            "queues": len(switch.queues._waiting) + len(switch.queues._stuck),
            "strangers": len(admission.strangers) + len(relay._shells) - len(admission.admitted),
            "clients that have no place": len(admission.admitted) - len(members),
            "legs": sum(len(member.legs) for member in members),
            "places": sum(member.incoming.count + member.unanswered.count for member in members),
            "requests": sum(member.dials + member.pending_requests for member in members),
            "bytes": sum(abs(member.queued_to) + abs(member.queued_from) + member.control_bytes for member in members),
        }
        | tables.held(relay, _RUNNING if relay.running else _REMEMBERED)
    )


def of_client(client: Client, *, reads: bool = True) -> dict[str, int]:
    """Data that ``client`` holds for transports, peers and attempts; ``reads`` if its programs read everything."""
    pool, ports = client.pool, client.services.ports()
    held = {
        "transports": len(client.transports),
        "attempts": len(pool._flights),
        "relays led to": len(set(pool._led_to) - set(pool.sessions)),
        "addresses": len(set(pool._addresses) - set(pool.sessions)),
        "dials": len(client.dialer._races),
        "arrivals": len(client.services.arrivals),
        "offers": sum(len(port.offers) for port in ports),
        "opened": sum(len(port._opened) for port in ports),
        "busy sessions": sum(not session.idle for session in pool.sessions.values()),
    }
    if isinstance(client, DmsgClient):
        held["resumable"] = len(client.resumable._by_peer)
        held["buffered bytes"] = client._buffers.used_bytes if reads else 0
    filled = tables.held(client, _RUNNING if client.running else _REMEMBERED)
    return _some(held | (filled if reads else {}))


def _some(held: dict[str, int]) -> dict[str, int]:
    return {name: number for name, number in held.items() if number}
