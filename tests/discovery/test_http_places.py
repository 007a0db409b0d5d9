"""Open connections of a discovery are bounded, and strangers who take all places cannot keep the next client out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.task import Clock
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET

from dmsg.http.places import Places, Standing

from .front import GET, Front

#: What a stranger sends on each of his connections: nothing, half a request, or a request of which he takes no answer.
SILENT, HALF, FULL = b"", GET[:20], GET


class Missing(Resource):
    """Every answer is a 404."""

    isLeaf = True

    def render(self, request: Any) -> bytes:
        request.setResponseCode(404)
        return b""


class Stuck(Resource):
    """Answers are never complete."""

    isLeaf = True

    def render(self, request: Any) -> int:
        return NOT_DONE_YET


class Late(Resource):
    """Answers when it is told to."""

    isLeaf = True

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Any] = []

    def render(self, request: Any) -> int:
        self.requests.append(request)
        return NOT_DONE_YET


def test_nothing_is_read_behind_a_bad_request_that_waited_for_an_answer(clock: Clock) -> None:
    late = Late()
    place = Front(clock, resource=late)
    wire = place.connect("192.0.2.1", GET + b"1\r\n\r\n")
    [request] = late.requests
    request.finish()
    clock.advance(0)
    assert wire.disconnecting
    wire.hang_up()
    assert place.site.connections == 0


@pytest.mark.parametrize("sent", [SILENT, HALF, FULL], ids=["silent", "half a request", "idle after a request"])
@pytest.mark.parametrize("network", ["10.{0}.0.1", "10.0.0.{0}", "2001:db8:{0}::1", "2001:db8:1:{0}::1"])
def test_sixteen_addresses_with_250_connections_each_do_not_shut_it(clock: Clock, sent: bytes, network: str) -> None:
    place = Front(clock, resource=Missing())
    strangers = [place.connect(network.format(n), sent) for n in range(16) for _ in range(250)]
    assert all(strangers) and place.site.connections == 4000
    for n in range(20):
        assert place.answers(f"192.0.2.{n}")
        for stranger in range(16):  # who come again at once
            place.connect(network.format(stranger), sent)
    assert place.site.connections <= 4000
    for one in strangers:
        one.hang_up()


@pytest.mark.parametrize("resource", [Missing(), Stuck()], ids=["half a request", "an answer that is not taken"])
@pytest.mark.parametrize("network", ["10.{0}.0.1", "10.0.0.{0}"])
def test_strangers_that_hold_all_places_do_not_push_out_who_has_not_asked_yet(
    clock: Clock, resource: Resource, network: str
) -> None:
    """A client's request takes a round trip, in which strangers that hold all places come again from a new address."""
    place = Front(clock, resource=resource)
    for n in range(16):
        for _ in range(250):
            place.connect(network.format(n), HALF if isinstance(resource, Missing) else FULL)
    for n in range(20):
        honest = place.connect(f"192.0.2.{n}")
        for stranger in range(20, 40):
            place.connect(network.format(stranger), HALF)
        assert not honest.aborting
        honest.hang_up()


@pytest.mark.parametrize("resource", [Missing(), Stuck()], ids=["half a request", "an answer that is not taken"])
@pytest.mark.parametrize("honest", ["192.0.{0}.1", "192.0.2.{0}"])
def test_strangers_of_a_thousand_networks_do_not_push_out_who_has_not_asked_yet(
    clock: Clock, resource: Resource, honest: str
) -> None:
    """Four places each. Three clients at a time, of networks of their own or behind one router, have their round trip."""
    place = Front(clock, resource=resource)
    sent = HALF if isinstance(resource, Missing) else FULL
    for n in range(4000):
        place.connect(f"10.{n % 1000 // 250}.{n % 250}.1", sent)
    for n in range(20):
        clients = [place.connect(honest.format(3 * n + at)) for at in range(3)]
        for stranger in range(20):
            place.connect(f"10.{stranger % 4}.{stranger}.2", sent)
        assert not any(one.aborting for one in clients)
        for one in clients:
            one.hang_up()


def test_connections_being_answered_make_room_for_a_network_that_has_fewer(clock: Clock) -> None:
    place = Front(clock, resource=Stuck(), connections=64, connections_per_address=16)
    strangers = [place.connect(f"10.{n}.0.1", GET) for n in range(4) for _ in range(16)]
    assert place.connect("192.0.2.1", GET) is not None
    assert strangers[0].aborting
    assert sum(one.aborting for one in strangers) == 1
    # A source with as many as the largest takes nothing from others.
    assert place.connect("10.2.0.2", GET) is None


def test_a_new_connection_has_five_seconds_for_its_first_byte(clock: Clock) -> None:
    place = Front(clock)
    silent = place.connect("192.0.2.1")
    asked = place.connect("192.0.2.2")
    clock.advance(4.9)
    asked.channel.dataReceived(GET)
    clock.advance(0.2)
    assert silent.aborting and not asked.aborting
    # One that has asked is kept for the next request.
    clock.advance(59)
    assert not asked.aborting
    clock.advance(1)
    assert asked.aborting


def test_a_request_has_ten_seconds_from_its_first_byte_to_its_last(clock: Clock) -> None:
    place = Front(clock)
    dripping = place.connect("192.0.2.1", GET + b"G")
    for byte in GET[1:10]:
        clock.advance(1)
        dripping.channel.dataReceived(bytes([byte]))
    assert not dripping.aborting
    clock.advance(1)
    assert dripping.aborting


@pytest.mark.parametrize("request_", [GET, GET.replace(b"Host", b"Connection: close\r\nHost")], ids=["kept", "closed"])
def test_an_answer_that_is_not_taken_costs_the_connection(clock: Clock, request_: bytes) -> None:
    stuck, plain = Front(clock, resource=Stuck()), Front(clock)
    connections = [stuck.connect("192.0.2.1", request_), plain.connect("192.0.2.1", request_)]
    assert plain.site.connections == 1
    clock.advance(59)
    assert not any(one.aborting for one in connections)
    clock.advance(1)
    assert all(one.aborting for one in connections)


def test_a_client_that_asks_on_and_does_not_read_gets_no_more_answers(clock: Clock) -> None:
    class Long(Resource):
        isLeaf = True
        asked = 0

        def render(self, request: Any) -> bytes:
            self.asked += 1
            return b"x" * 20_000

    resource = Long()
    place = Front(clock, resource=resource)
    connection = place.connect("192.0.2.1", GET)
    write = connection.write

    def congested(data: bytes) -> None:
        write(data)
        if len(connection.value()) > 65_536 and connection.producer is not None:
            connection.producer.pauseProducing()

    connection.write = connection.writeSequence = lambda data: congested(  # type: ignore[method-assign]
        data if isinstance(data, bytes) else b"".join(data)
    )
    connection.channel.dataReceived(GET * 1000)
    for _ in range(10):
        clock.advance(0)
    assert 1 < resource.asked < 8
    assert connection.disconnecting


def test_connections_on_which_requests_are_sent_in_a_row_take_turns(clock: Clock) -> None:
    asked = []

    class Noting(Missing):
        def render(self, request: Any) -> bytes:
            asked.append(request.getClientAddress().host)
            return super().render(request)

    place = Front(clock, resource=Noting())
    hosts = ["10.0.0.1", "10.0.0.2"]
    one, other = (place.connect(host, GET * 50 + GET[:9]) for host in hosts)
    clock.advance(0)
    assert asked == hosts * 50
    one.channel.dataReceived(GET[9:] + GET)
    other.channel.dataReceived(GET[9:])
    one.hang_up()
    clock.advance(60)
    assert asked == hosts * 51
    assert one.value().count(b" 404 ") == 51 and other.value().count(b" 404 ") == 51


POST = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n"


@pytest.mark.parametrize("network", ["2001:db8:{0}::1", "2001:db8:1:{0}::1"])
def test_bodies_that_do_not_come_keep_no_other_one_out(clock: Clock, network: str) -> None:
    place = Front(clock, resource=Missing())
    strangers = [place.connect(network.format(n), POST) for n in range(2) for _ in range(128)]
    assert place.site.bodies == 256
    for n in range(20):
        honest = place.connect(f"192.0.2.{n}", POST)
        for stranger in range(2):  # who come again at once
            place.connect(network.format(stranger), POST)
        honest.channel.dataReceived(b"{}")
        assert b" 404 " in honest.value()
    assert place.site.bodies <= 256
    assert sum(one.aborting for one in strangers) > 20


def test_a_body_that_is_complete_gives_its_place_to_no_other_one(clock: Clock) -> None:
    place = Front(clock, resource=Stuck(), concurrent_bodies=3)
    answered = [place.connect("10.0.0.1", POST + b"{}") for _ in range(2)]
    coming = place.connect("192.0.2.1", POST)
    newcomer = place.connect("192.0.2.2", POST + b"{}")
    assert coming.aborting and place.site.bodies == 3
    refused = place.connect("192.0.2.3", POST + b"{}")
    assert refused.value().startswith(b"HTTP/1.1 503 ")
    assert not any(one.aborting for one in [*answered, newcomer])
    for one in [*answered, coming, newcomer]:
        one.hang_up()
    assert place.site.bodies == 0


def test_however_many_are_answered_a_new_body_takes_the_place_of_one_that_is_coming_in(clock: Clock) -> None:
    place = Front(clock, resource=Stuck())
    answered = [place.connect("10.0.0.1", POST + b"{}") for _ in range(100)]
    coming = [place.connect(f"10.1.{n}.1", POST) for n in range(156)]
    newcomers = [place.connect(f"192.0.2.{n}", POST + b"{}") for n in range(156)]
    assert all(one.aborting for one in coming) and place.site.bodies == 256
    assert not any(one.aborting or one.value() for one in [*answered, *newcomers])


# --- the table ---------------------------------------------------------------------------------------------------------


def _victim_by_looking_at_all(held: dict[int, tuple[str, Standing, int]], newcomer: str) -> set[int | None]:
    """All that may be given: the oldest, in its standing, of a network that has the most of that standing."""
    most: dict[Standing, int] = {}
    found: dict[Standing, set[int | None]] = {}
    for standing in Standing:
        sizes: dict[str, list[tuple[int, int]]] = {}
        for item, (network, what, since) in held.items():
            if what is standing:
                sizes.setdefault(network, []).append((since, item))
        most[standing] = max(map(len, sizes.values()), default=0)
        found[standing] = {min(items)[1] for items in sizes.values() if len(items) == most[standing]} or {None}
    idle, new, receiving, answering = most.values()
    if idle * 4 >= max(new, receiving, answering):
        return found[Standing.IDLE]
    if max(new, receiving) >= answering:
        return found[Standing.NEW if new >= receiving else Standing.RECEIVING]
    own = sum(network == newcomer for network, _, _ in held.values())
    return found[Standing.ANSWERING] if answering > own else {None}


@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["a", "b", "c"]), st.sampled_from([*Standing, None]))))
def test_the_table_agrees_with_looking_at_all(steps: list[tuple[int, str, Standing | None]]) -> None:
    places: Places[int] = Places()
    held: dict[int, tuple[str, Standing, int]] = {}
    for at, (item, network, standing) in enumerate(steps):
        if item not in held:
            places.add(item, network)
            held[item] = (network, Standing.NEW, at)
        elif standing is None:
            places.discard(item)
            del held[item]
        else:
            places.move(item, standing)
            if held[item][1] is not standing:
                held[item] = (held[item][0], standing, at)
        assert len(places) == len(held)
        assert places.victim(network) in _victim_by_looking_at_all(held, network)
        new = {one: kept for one, kept in held.items() if kept[1] is Standing.NEW}
        assert places.oldest_new() in _victim_by_looking_at_all(new, network)
    places.discard(99)
    places.move(99, Standing.ANSWERING)
    assert all(places.standing(item) is what for item, (_, what, _) in held.items())
