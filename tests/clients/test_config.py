"""Settings of clients that would make a client useless, or busy with nothing, are refused when they are read."""

from __future__ import annotations

import pytest
import pytest_twisted
from twisted.internet.protocol import Factory, Protocol
from twisted.protocols.wire import Echo

from dmsg.errors import ConfigError
from dmsg.messaging.client.settings import MessagingSettings
from dmsg.mux.client.service import ClientConfig
from dmsg.mux.client.settings import ClientSettings
from dmsg.mux.core.limits import ConnectionConfig
from dmsg.mux.core.sealed_stream import LEAST_DATA_BYTES
from dmsg.ops.config import resolve
from dmsg.rmb.client.config import RmbConfig
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork

CLIENTS = {"client": ClientSettings, "messaging": MessagingSettings}


def refusal(role: str, **options: str) -> str:
    """The line with which ``options`` are refused."""
    with pytest.raises(ConfigError) as caught:
        resolve(CLIENTS[role], role, {name.replace("_", "-"): value for name, value in options.items()}, {})
    return str(caught.value)


@pytest.mark.parametrize("role", CLIENTS)
@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("pool", ("connect_timeout_s", "backoff_first_s", "backoff_limit_s", "urgent_backoff_s")),
        ("pool", ("poll_s", "poll_limit_s")),
        ("dial", ("timeout_s",)),
        ("scores", ("half_life_s", "rank_weight", "place_weight", "connect_neutral_ms", "accept_neutral_ms")),
    ],
)
def test_times_and_weights_are_more_than_0(role: str, group: str, names: tuple[str, ...]) -> None:
    for name in names:
        option = f"{group.removesuffix('s')}_{name}"
        line = refusal(role, **{option: "0"})
        assert line == f"{group}: {name} must be more than 0 (in option --{option.replace('_', '-')})"


@pytest.mark.parametrize("role", CLIENTS)
@pytest.mark.parametrize(
    ("group", "option", "name"),
    [
        ("pool.race", "pool_race_attempts", "attempts"),
        ("dial", "dial_servers", "servers"),
        ("dial.callers", "dial_caller_burst", "burst"),
        ("scores", "score_relays", "relays"),
        ("listener", "listener_offers", "offers"),
        ("listener", "listener_offers_per_key", "offers_per_key"),
        ("listener", "listener_open_transports", "open_transports"),
        ("connection", "connection_flush_bytes", "flush_bytes"),
        ("connection", "connection_offered_limit", "offered_limit"),
    ],
)
def test_a_number_that_lets_nothing_through_is_refused(role: str, group: str, option: str, name: str) -> None:
    line = refusal(role, **{option: "0"})
    assert line == f"{group}: {name} must be at least 1 (in option --{option.replace('_', '-')})"


def test_a_link_has_room_for_channels_of_others() -> None:
    line = refusal("messaging", connection_incoming_limit="0")
    assert line == "connection: incoming_limit must be at least 1 (in option --connection-incoming-limit)"


@pytest.mark.parametrize("role", CLIENTS)
def test_a_handshake_has_time(role: str) -> None:
    line = refusal(role, handshake_timeout_s="0")
    assert line == f"{role}: handshake_timeout_s must be more than 0 (in option --handshake-timeout-s)"


@pytest.mark.parametrize(
    ("name", "least"),
    [("resume_pause_s", "more than 0"), ("resume_pause_limit_s", "more than 0"), ("resume_burst", "at least 1")],
)
def test_a_transport_without_a_path_may_move_and_pauses_between_searches(name: str, least: str) -> None:
    line = refusal("client", **{name: "0"})
    assert line == f"client: {name} must be {least} (in option --{name.replace('_', '-')})"


def test_a_client_without_resumption_needs_no_pause_of_its_own() -> None:
    assert resolve(ClientSettings, "client", {"resume-grace-s": "0"}, {}).config.resume_grace_s == 0


@pytest.mark.parametrize("role", CLIENTS)
@pytest.mark.parametrize("name", ["pause_bytes", "pending_limit_bytes"])
def test_a_writer_is_paused_before_it_is_cut_off(role: str, name: str) -> None:
    value = "64KiB" if name == "pending_limit_bytes" else "64MiB"
    assert "pending_limit_bytes must be more than pause_bytes" in refusal(role, **{f"connection_{name}": value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("send_window_bytes", 0),
        ("secure_window_bytes", 0),
        ("frame_data_bytes", 0),
        ("sealed_data_bytes", LEAST_DATA_BYTES - 1),
        ("receive_limit_bytes", 0),
        ("rekey_after_s", 0.0),
        ("ok_timeout_s", 0.0),
        ("rekey_after_s", float("nan")),
    ],
)
def test_a_connection_passes_data_and_is_not_only_busy(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        ConnectionConfig(**{name: value})


class Collector(Protocol):
    data = b""

    def dataReceived(self, data: bytes) -> None:
        self.data += data


@pytest_twisted.ensureDeferred
async def test_the_shortest_frames_that_are_accepted_carry_data_with_acknowledgements() -> None:
    config = ClientConfig(connection=ConnectionConfig(sealed_data_bytes=LEAST_DATA_BYTES))
    async with LocalNetwork(MemoryNetwork()) as network:
        alice, bob = await network.client(config=config), await network.client(config=config)
        bob.listen(Factory.forProtocol(Echo))
        collector = Collector()
        transport = await network.wait(alice.dial(bob.public_key))
        transport.attach(collector)
        transport.write(bytes(1000))
        network.reactor.advance(1.0)
        assert collector.data == bytes(1000)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "connect_timeout_s",
            "backoff_first_s",
            "backoff_limit_s",
            "urgent_backoff_s",
            "probe_s",
            "calls",
            "handlers",
        ),
        *("calls_bytes", "answers", "answers_bytes", "relay_queue_bytes", "replaced_pause_s"),
    ],
)
def test_a_client_of_the_bus_pauses_and_lets_calls_through(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        RmbConfig(**{name: 0})
