"""A discovery that lies: old entries, those of others, invented ones, and answers that are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.web.http_headers import Headers

from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.discovery.client import HttpDiscovery
from dmsg.discovery.entry import ClientPart, Entry, ServerPart
from dmsg.discovery.errors import DISCOVERY_ERRORS, DiscoveryError
from dmsg.http.errors import NoAnswer
from tests.simulation.machine import Machine
from tests.simulation.world import World

#: Lies about an entry, about a list and about a post.
LIES: Final = (
    "none",
    "old",
    "another's",
    "invented",
    "altered",
    "garbage",
    "long",
    "hints",
    "status",
    "silence",
    "cut",
    "slow",
)
LISTS: Final = ("old", "empty", "invented", "one", "garbage", "long", "status", "silence", "clients", "altered")
POSTS: Final = ("lost", "refused", "status", "silence", "taken and refused")
_ANSWERS_S: Final = 0.02
_TIMEOUT_S: Final = 10.0


class Liar:
    """Discovery's answers to everybody; the truth while it is not ``active``."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.random = random = world.random("discovery")
        self.active = False
        self.share = random.choice([0.1, 0.5])
        self.lies = self._some(LIES)
        self.lists = self._some(LISTS)
        self.posts = self._some(POSTS)
        #: The real relays.
        self.real_relays: Callable[[], list[PublicKey]] = list
        self._old: list[Entry] = []
        self._made_up: list[SecretKey] = [world.key(f"made up {number}") for number in range(20)]

    def _some(self, kinds: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(kind for kind in kinds if self.random.random() < 0.4) or kinds

    @property
    def _lies(self) -> bool:
        return self.active and self.random.random() < self.share

    async def answer(self, method: str, url: str, body: bytes | None, machine: Machine) -> tuple[int, Headers, bytes]:
        """Status, headers and body."""
        await deferLater(machine, _ANSWERS_S)
        if machine.is_off:
            await Deferred()
        try:
            if method == "POST":
                return await self._take(Entry.parse(body or b""), machine)
            if "available_servers" in url:
                return await self._list(machine)
            return await self._entry(PublicKey.parse(url.rpartition("/")[2]), machine)
        except DiscoveryError as error:
            return _refused(type(error), error)

    async def _take(self, entry: Entry, machine: Machine) -> tuple[int, Headers, bytes]:
        entry.validate()
        entry.verify()
        how = self.random.choice(self.posts) if self._lies else ""
        if how == "lost":
            return _good(b"{}")
        if how == "refused":
            return _refused(self.random.choice(list(DISCOVERY_ERRORS.values())))
        if how == "status":
            return self.random.choice([500, 302, 204]), Headers(), b""
        if how == "silence":
            await self._silence(machine)
        await self.world.store.put(entry, self.world.now_ns())
        self._old.append(entry)
        del self._old[:-100]
        return _good(b"{}") if how != "taken and refused" else (500, Headers(), b"")

    async def _list(self, machine: Machine) -> tuple[int, Headers, bytes]:
        servers = await self.world.listing.servers(64, self.world.now_ns())
        random, how = self.random, self.random.choice(self.lists) if self._lies else ""
        if how == "old":
            servers = random.sample(self._old, min(len(self._old), 64))
        elif how == "empty":
            servers = []
        elif how == "invented":
            servers = [self._invented_relay() for _ in range(random.choice([1, 20]))] + random.choice([servers, []])
        elif how == "one":
            servers = servers[:1] * 64
        elif how == "clients":
            servers = [self._invented(key.public_key, key) for key in self._made_up]
        elif how == "altered":
            return _good(b"[" + b",".join(self._altered(one) for one in servers) + b"]")
        elif how:
            return await self._no_answer(how, machine)
        return _good(b"[" + b",".join(one.to_json() for one in servers) + b"]")

    async def _entry(self, key: PublicKey, machine: Machine) -> tuple[int, Headers, bytes]:
        random, how = self.random, self.random.choice(self.lies) if self._lies else ""
        if how == "none":
            return _refused(DISCOVERY_ERRORS["entry of public key is not found"])
        if how == "old":
            old = [one for one in self._old if one.static == key]
            if old:
                return _good(old[0].to_json())
        elif how == "another's" and self._old:
            return _good(random.choice(self._old).to_json())
        elif how == "invented":
            return _good(self._invented(key, random.choice(self._made_up)).to_json())
        elif how == "altered":
            return _good(self._altered(await self.world.store.get(key, self.world.now_ns())))
        elif how == "hints":
            status, _, body = _refused(DISCOVERY_ERRORS["entry of public key is not found"])
            number = str(random.choice([0, -1, 7, 1 << 62, (1 << 64) - 1, 10**19])).encode()
            return status, Headers({b"Dmsg-Next-Sequence": [number], b"Dmsg-After-Timestamp": [number]}), body
        elif how == "slow":
            await deferLater(machine, random.choice([0.5, 3.0, 9.0]))
        elif how:
            return await self._no_answer(how, machine)
        return _good((await self.world.store.get(key, self.world.now_ns())).to_json())

    async def _no_answer(self, how: str, machine: Machine) -> tuple[int, Headers, bytes]:
        random = self.random
        if how == "silence":
            await self._silence(machine)
        if how == "cut":
            raise NoAnswer("the answer was cut off")
        if how == "long":
            raise NoAnswer("the answer is too long")
        if how == "status":
            return random.choice([500, 301, 429, 204, 999]), Headers(), random.choice([b"", b"[]", b'{"message":7}'])
        return _good(
            random.choice([b"", b"null", b"[[[", b"{}", b"[{}]", b'[null,7,{"static":"00"}]', random.randbytes(90)])
        )

    @staticmethod
    async def _silence(machine: Machine) -> None:
        await deferLater(machine, _TIMEOUT_S)
        raise NoAnswer("no answer in time")

    # --- invented entries --------------------------------------------------------------------------------------------------

    def _invented(self, key: PublicKey, signer: SecretKey) -> Entry:
        made_up = [one.public_key for one in self.random.sample(self._made_up, 3)]
        relays = (*self.real_relays(), *made_up)
        promise = self.random.choice(["0.0.1", "0.1.0", "9.9"])
        mine = Entry(promise, 7, self.world.now_ns(), signer.public_key, ClientPart(relays)).sign(signer)
        return Entry(promise, 7, mine.timestamp, key, mine.client, signature=mine.signature)

    def _invented_relay(self) -> Entry:
        random, signer = self.random, self.random.choice(self._made_up)
        relays = [f"{relay.host}:80" for relay in self.world.relays]
        address = random.choice(
            [*relays, f"10.9.{random.randrange(256)}.1:80", "no-such-name:80", f"10.0.{random.randrange(4)}.1:9"]
        )
        part = ServerPart(address, random.choice([1, 1_000, 1 << 62]))
        return Entry("0.1.0", random.choice([0, 7]), self.world.now_ns(), signer.public_key, server=part).sign(signer)

    def _altered(self, entry: Entry) -> bytes:
        text = entry.to_json()
        at = self.random.randrange(len(text))
        return text[:at] + bytes((text[at] ^ 1,)) + text[at + 1 :]


class _Caller:
    """In place of HTTP."""

    def __init__(self, liar: Liar, machine: Machine) -> None:
        self._liar = liar
        self._machine = machine

    async def call(self, method: str, url: str, **options: Any) -> tuple[int, Headers, bytes]:
        """See :class:`~dmsg.http.client.HttpCaller`."""
        return await self._liar.answer(method, url, options.get("body"), self._machine)


def discovery(liar: Liar, machine: Machine) -> HttpDiscovery:
    """Discovery as the program on ``machine`` sees it: it checks answers as it does over HTTP."""
    client = HttpDiscovery("http://discovery:80", cast(Any, None), machine, now_s=lambda: liar.world.now_ns() / 1e9)
    client._http = cast(Any, _Caller(liar, machine))
    return client


def _good(body: bytes) -> tuple[int, Headers, bytes]:
    return 200, Headers(), body


def _refused(kind: type[DiscoveryError], error: DiscoveryError | None = None) -> tuple[int, Headers, bytes]:
    headers = Headers()
    for name, value in (
        (b"Dmsg-Next-Sequence", getattr(error, "next_sequence", None)),
        (b"Dmsg-After-Timestamp", getattr(error, "after_timestamp", None)),
    ):
        if value is not None:
            headers.addRawHeader(name, str(value).encode())
    return kind.reference_status, headers, b'{"message":"%s"}' % kind.text.encode()
