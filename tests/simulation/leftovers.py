"""What relays and clients hold, by name, where it is not nothing: at rest they hold none of it."""

from __future__ import annotations

from dmsg.messaging.client.service import MessagingClient
from dmsg.mux.client.service import DmsgClient
from dmsg.serving.service import RelayService

Client = DmsgClient | MessagingClient


def of_relay(relay: RelayService) -> dict[str, int]:
    """What ``relay`` holds for transports and strangers; its clients may be there."""
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
        }
    )


def of_client(client: Client, *, reads: bool = True) -> dict[str, int]:
    """What ``client`` holds for transports, peers and attempts; ``reads`` is whether its programs read what there is."""
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
    return _some(held)


def _some(held: dict[str, int]) -> dict[str, int]:
    return {name: number for name, number in held.items() if number}
