"""Peers, and the local programs at their Redis: one that asks other twins, and one that serves a command."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.python.failure import Failure

from dmsg.address import HostPort, RedisAddress
from dmsg.rmb.client.exchange import Exchange
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.peer.commands import LOCAL, REPLY
from dmsg.rmb.peer.gateway import Gateway

from .network import Process
from .redis import PORT, Redis
from .relays import Registry, Relay
from .sessions import key_of

if TYPE_CHECKING:
    from .world import World


@dataclass
class Ask:
    """A local program's request to other twins."""

    number: int
    peer: Peer
    twins: tuple[int, ...]
    how: str
    began_at: float
    ends_at: float
    #: The answers in the list, with their times.
    answers: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    #: Handlers and services that got it.
    handled: list[tuple[float, Any, int]] = field(default_factory=list)

    def __str__(self) -> str:
        answers = [(round(at, 3), one["src"], one.get("err") or one["dat"][:12]) for at, one in self.answers]
        return (
            f"ask {self.number} of {self.peer} to {self.twins}: {self.how}, began {self.began_at:.3f}, ends"
            f" {self.ends_at:.3f}; answers {answers}, handled {[(round(at, 3), str(who), n) for at, who, n in self.handled]}"
        )


class Peer:
    """A peer of a twin, the only program in the session without a name."""

    def __init__(self, world: World, twin: int, host: str, redis_host: str, relays: list[Relay]) -> None:
        self.world = world
        self.address = SessionAddress(twin)
        self.host = host
        self.relays = relays
        self.random = Random(world.random.random())
        self.redis = Redis(world.network, redis_host, Random(self.random.random()), self.pushed)
        self.incarnation = 0
        self.running = False
        self.ahead_s = 0.0
        #: Times of its last kill or stop, and of its restart.
        self.gone_at = self.back_at = -1.0
        self.killed_at: list[float] = []

    def __str__(self) -> str:
        return f"peer {self.address}"

    def start(self) -> None:
        self.incarnation += 1
        self.back_at = self.world.network.seconds()
        self.process = process = Process(self.world.network, self.host, Random(self.random.random()))
        process.ahead_s = self.ahead_s
        self.registry = Registry(self.world.twins, process)
        self.gateway = Gateway(
            process,
            RedisAddress(HostPort(self.redis.host, PORT)),
            lambda owner: Exchange(
                process,
                key_of(self.address.twin),
                self.registry,
                [relay.url for relay in self.relays],
                owner,
                publish=False,
                random=process.random.randbytes,
                now_s=process.now_s,
            ),
            random=process.random.randbytes,
            now_s=process.now_s,
        )
        self.running = True
        self._starting = ensureDeferred(self.gateway.start())

        def begun(outcome: Any) -> None:
            if isinstance(outcome, Failure):
                self.world.fail(f"{self} could not start: {outcome.getTraceback()}")

        self._starting.addBoth(begun)

    def kill(self, *, silently: bool = False) -> None:
        self.running = False
        self.gone_at = self.world.network.seconds()
        self.killed_at.append(self.gone_at)
        self.world.graves.append((self.process, self.gateway))
        self.process.kill(silently=silently)

    def stop(self) -> Deferred[None]:
        self.running = False
        self.gone_at = self.world.network.seconds()
        process, name = self.process, f"{self} {self.incarnation}"

        def ended(outcome: Any) -> None:
            self.world.ended.append((process, name))
            if isinstance(outcome, Failure):
                self.world.fail(f"{name} could not stop: {outcome.getTraceback()}")

        return ensureDeferred(self.gateway.stop()).addBoth(ended)

    def levels(self) -> dict[str, float]:
        """Levels that must be 0 when nothing is in progress."""
        gateway = self.gateway
        requests, services, exchange = gateway.requests, gateway.services, gateway.exchange
        return {
            "requests": requests.under_way + len(requests._to_twin),
            "answers": requests.waiting + requests._waiting_bytes + len(requests._noting),
            "services": services.waiting
            + services._all_waiting_bytes
            + len(services._waiting_bytes)
            + len(services._sends),
            "finishing": len(gateway._finishing),
            "calls": len(exchange._calls._calls) + exchange._calls._bytes,
            "parcels": len(exchange.relays._waiting),
            "look-ups": len(exchange._intake._under_way),
            "kept answers": len(exchange._answers) + exchange._answers.held_bytes,
            "carried": sum(map(len, exchange.relays._carried.values())),
            "lists": sum(
                len(found)
                for key, found in self.redis.lists.items()
                if key.startswith("msgbus.") and key != "msgbus.do"
            ),
            "notes": len(self.redis.notes),
        }

    # --- local programs ------------------------------------------------------------------------------------------------

    def ask(self, twins: tuple[int, ...], *, size: int, life_s: int, how: str) -> Ask:
        """Push a request, like a program at this Redis."""
        world = self.world
        now = world.network.seconds()
        ask = Ask(len(world.asks), self, twins, how, now, now + life_s)
        world.asks.append(ask)
        data = b"a%d|" % ask.number + bytes(size)
        message = {
            "ver": 1,
            "ref": str(ask.number),
            "cmd": "do",
            "exp": life_s,
            "dat": base64.b64encode(data).decode(),
            "tag": None,
            "dst": list(twins),
            "ret": f"answers.{ask.number}",
            "shm": None,
            "now": int(self.process.now_s()),
        }
        self.redis.push(LOCAL, json.dumps(message).encode())
        return ask

    def pushed(self, key: str, data: bytes) -> None:
        """A message was pushed to a list."""
        world = self.world
        if key.startswith("answers."):
            answer = json.loads(data)
            world.asks[int(answer["ref"])].answers.append((world.network.seconds(), answer))
        elif key == "msgbus.do":
            self.redis.process.callLater(0.01 + self.random.random(), self._serve)

    def _serve(self) -> None:
        """Take a request, like a program at this Redis that serves a command."""
        data = self.redis.pop("msgbus.do")
        if data is None:
            return
        request = json.loads(data)
        payload = base64.b64decode(request["dat"])
        how, answer = self.world.served(self, request, payload)
        if how == "never":
            return
        reply = {"ver": 1, "ref": request["ref"], "dst": request["src"], "now": int(self.process.now_s()), "shm": None}
        if how == "refuse":
            reply |= {"dat": "", "err": {"code": 77, "message": "no"}}
        else:
            reply |= {"dat": base64.b64encode(answer).decode(), "err": None}
        pause_s = 5 * self.random.random() if how == "slow" else 0.0
        self.redis.process.callLater(pause_s, self.redis.push, REPLY, json.dumps(reply).encode())
