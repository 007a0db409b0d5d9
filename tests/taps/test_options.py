"""Options of the roles and what becomes of them, without a process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from twisted.internet.interfaces import IStreamClientEndpointStringParserWithReactor, IStreamServerEndpointStringParser
from twisted.plugin import IPlugin
from zope.interface.verify import verifyObject

from dmsg.address import HostPort
from dmsg.crypto.keys import SecretKey, write_key_file
from dmsg.mux.relay.limits import RelayLimits
from dmsg.ops.settings import settings_of
from dmsg.taps import discovery, messaging_server, rmb_peer, rmb_relay, server
from dmsg.taps._parsers import LazyParser
from dmsg.taps.settings import DiscoverySettings, ServerSettings

KEY = SecretKey(b"\x11" * 32)


def parse(module: Any, *arguments: str, **environ: str) -> Any:
    options = module.Options(environ)
    options.parseOptions(list(arguments))
    return options.settings


def refusal(module: Any, *arguments: str, **environ: str) -> str:
    """The one line with which options are refused."""
    with pytest.raises(SystemExit) as caught:
        module.makeService(_parsed(module, *arguments, **environ))
    assert isinstance(caught.value.code, str) and "\n" not in caught.value.code
    return caught.value.code


def _parsed(module: Any, *arguments: str, **environ: str) -> Any:
    options = module.Options(environ)
    options.parseOptions(list(arguments))
    return options


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (server, ("half-open", "half-open-per-address", "handshake-burst", "request-burst", "pair-request-burst")),
        (server, ("stranger-request-burst", "known-request-burst", "stray-burst", "handshake-burst-per-network")),
        (messaging_server, ("half-open", "handshake-burst-per-address", "request-burst")),
        (server, ("connections", "connections-per-address", "transports-per-connection", "pending-requests")),
        (messaging_server, ("connections", "connections-per-address", "unanswered-per-target")),
        (rmb_relay, ("connections", "connections-per-address")),
        (discovery, ("connections", "connections-per-address", "headers")),
        (rmb_relay, ("half-open", "handshake-burst", "post-burst", "get-burst", "arrival-burst", "rate-addresses")),
        (discovery, ("get-burst", "total-post-burst", "rate-addresses", "concurrent-bodies")),
        (rmb_relay, ("sessions-per-twin", "token-lifetime-s", "page-envelopes")),
        (rmb_relay, ("queued-total-bytes", "incoming-total-bytes", "pending-total-bytes")),
    ],
)
def test_a_limit_with_which_no_client_would_be_served_is_refused_at_the_start(
    module: Any, options: tuple[str, ...]
) -> None:
    for option in options:
        arguments = ("--key", "key") if module in (server, messaging_server) else ()
        line = refusal(module, *arguments, f"--limit-{option}", "0")
        name = option.replace("-", "_")
        assert line == f"{module.Options.tap_name}: limits: {name} must be at least 1 (in option --limit-{option})"


@pytest.mark.parametrize(
    "option",
    [
        "store-limit-new-keys-burst",
        "store-limit-clients",
        "store-limit-client-bytes",
        "store-limit-relays",
        "store-limit-relay-bytes",
        "proof-limit-proof-burst",
        "proof-limit-relays",
        "proof-limit-concurrent",
        "proof-limit-resolving",
        "proof-limit-sync-relays",
    ],
)
def test_the_same_holds_for_limits_of_discoverys_store_and_proofs(option: str) -> None:
    assert f"must be at least 1 (in option --{option})" in refusal(discovery, f"--{option}", "0")


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (server, ("limit-first-byte-timeout-s", "limit-handshake-timeout-s")),
        (messaging_server, ("limit-first-byte-timeout-s", "limit-handshake-timeout-s")),
        (discovery, ("limit-first-byte-timeout-s", "limit-request-timeout-s", "limit-answer-timeout-s")),
        (discovery, ("store-limit-server-ttl-s", "store-limit-client-ttl-s", "store-limit-base-client-ttl-s")),
        (discovery, ("events-rotate-s", "events-rotate-bytes")),
        (rmb_relay, ("limit-handshake-timeout-s", "limit-ping-after-s")),
        (server, ("limit-request-timeout-s", "limit-queue-stall-timeout-s")),
        (messaging_server, ("limit-request-timeout-s", "limit-queue-stall-timeout-s")),
        (rmb_relay, ("limit-slow-consumer-timeout-s",)),
    ],
)
def test_a_time_of_0_in_which_nothing_could_be_done_is_refused_at_the_start(
    module: Any, options: tuple[str, ...]
) -> None:
    arguments = ("--key", "key") if module in (server, messaging_server) else ()
    for option in options:
        line = refusal(module, *arguments, f"--{option}", "0")
        assert "must be more than 0" in line and f"in option --{option}" in line


@pytest.mark.parametrize(
    ("module", "options", "instead"),
    [
        (server, ("limit-handshakes-per-s-per-address", "limit-handshakes-per-s-per-network"), ""),
        (server, ("limit-handshakes-per-s", "limit-requests-per-s", "limit-pair-requests-per-s"), ""),
        (messaging_server, ("limit-stranger-requests-per-s", "limit-known-requests-per-s"), ""),
        (rmb_relay, ("limit-handshakes-per-s", "limit-posts-per-s-per-address"), ""),
        (rmb_relay, ("limit-gets-per-s-per-address", "limit-arrivals-per-s-per-address"), ""),
        (discovery, ("proof-limit-proofs-per-s",), ""),
        (
            discovery,
            ("limit-get-rate-per-s", "limit-servers-rate-per-s", "limit-post-rate-per-s"),
            ", or none for no limit",
        ),
        (discovery, ("limit-connect-rate-per-s", "limit-ranks-rate-per-s"), ", or none for no limit"),
        (discovery, ("store-limit-new-keys-per-s", "store-limit-network-new-keys-per-s"), ", or none for no limit"),
    ],
)
def test_a_rate_of_0_that_ends_with_the_first_burst_is_refused_at_the_start(
    module: Any, options: tuple[str, ...], instead: str
) -> None:
    arguments = ("--key", "key") if module in (server, messaging_server) else ()
    for option in options:
        line = refusal(module, *arguments, f"--{option}", "0")
        assert "_per_s" in line and f"in option --{option}" in line
        assert f" must be more than 0{instead}: with 0 nothing would pass after the first burst (" in line


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (server, ("limit-strays-per-s", "limit-bytes-per-s")),
        (rmb_relay, ("limit-posts-per-s", "limit-posts-per-s-per-network")),
        (discovery, ("limit-total-get-rate-per-s", "limit-reserved-post-rate-per-s")),
        (discovery, ("proof-limit-failures-per-address-per-s", "proof-limit-failures-per-source-per-s")),
    ],
)
def test_a_rate_of_0_that_has_a_meaning_is_accepted(module: Any, options: tuple[str, ...]) -> None:
    arguments = ("--key", "key") if module is server else ()
    for option in options:
        parse(module, *arguments, f"--{option}", "0")


@pytest.mark.parametrize(
    ("option", "least"),
    [
        ("body-bytes", "at least 1"),
        ("headers-bytes", "at least 1"),
        ("pending-writes", "at least 1"),
        ("available-servers", "at least 1"),
        ("available-servers-bytes", "at least 1"),
        ("idle-timeout-s", "more than 0"),
    ],
)
def test_a_discovery_that_would_take_or_list_nothing_is_refused_at_the_start(option: str, least: str) -> None:
    line = refusal(discovery, f"--limit-{option}", "0")
    assert line == f"dmsg-discovery: limits: {option.replace('-', '_')} must be {least} (in option --limit-{option})"


def test_entries_may_live_for_ever() -> None:
    assert parse(discovery, "--store-limit-server-ttl-s", "none").store_limits.server_ttl_s is None


@pytest.mark.parametrize("option", ["--limit-ping-after-s=60", "--limit-dead-after-s=20"])
def test_a_session_is_pinged_before_it_is_closed_for_silence(option: str) -> None:
    assert "limits: ping_after_s must be more than 0, and less than dead_after_s" in refusal(rmb_relay, option)


def test_a_window_has_less_than_4_gib() -> None:
    line = refusal(server, "--key", "key", "--limit-window-bytes", "4GiB")
    assert line == "dmsg-server: limits: window_bytes must be less than 4 GiB (in option --limit-window-bytes)"
    assert parse(server, "--key", "key", "--limit-window-bytes", str(2**32 - 1)).limits.window_bytes == 2**32 - 1


def test_a_role_reads_the_key_of_the_user_it_is_going_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``twistd --uid`` is root when the key file is read, and its user owns that file."""
    path, uid, fstat = tmp_path / "key", 54_321, os.fstat

    def of_the_user(descriptor: int) -> os.stat_result:
        status = fstat(descriptor)
        return os.stat_result([*status[:4], uid, *status[5:]])

    write_key_file(path, KEY)
    monkeypatch.setattr(os, "fstat", of_the_user)
    arguments = ("--key", str(path), "--listen", "tcp:0")
    assert "belongs to uid 54321" in refusal(server, *arguments)
    for given, refused in (({"uid": None}, True), ({"uid": uid + 1}, True), ({"uid": uid}, False)):
        options = _parsed(server, *arguments)
        options.parent = given
        if refused:
            with pytest.raises(SystemExit):
                server.makeService(options)
        else:
            assert server.makeService(options).readiness() == "not serving"


def test_a_server_with_everything() -> None:
    relay = "--key k --listen tcp:1 --public-address relay.example:8080 --discovery http://d --drain-timeout 3"
    running = "--limit-connections 5 --events - --admin tcp:2 --node r1"
    settings = parse(server, *f"{relay} {running}".split())
    assert settings.key == Path.cwd() / "k"
    assert settings.public_address == HostPort("relay.example", 8080)
    assert (settings.listen, settings.discovery, settings.drain_timeout) == ("tcp:1", "http://d", 3.0)
    assert (settings.events, settings.admin, settings.node) == ("-", "tcp:2", "r1")
    assert settings.limits == RelayLimits(connections=5)


def test_defaults_are_those_of_the_limits() -> None:
    assert parse(server, "--key", "k").limits == RelayLimits()
    assert parse(discovery) == DiscoverySettings()


def test_a_list_is_one_option_or_several() -> None:
    keys = tuple(SecretKey(bytes([number]) * 32).public_key for number in (1, 2, 3))
    one, two, three = map(str, keys)
    assert parse(discovery, "--ranks-key", f"{one},{two}", "--ranks-key", three).ranks_key == keys
    assert parse(discovery, DMSG_RANKS_KEY=f"{one} {two},{three}").ranks_key == keys


def test_every_limit_is_an_option() -> None:
    options = {one.option for one in settings_of(ServerSettings)}
    assert {f"limit-{name.replace('_', '-')}" for name in RelayLimits.__dataclass_fields__} <= options
    assert "store-limit-server-ttl-s" in {one.option for one in settings_of(DiscoverySettings)}


def test_one_environment_serves_all_roles() -> None:
    environ = {"DMSG_STORE": "memory:", "DMSG_KEY": "k", "DMSG_LISTEN": "tcp:5", "DMSG_SERVER": "x"}
    assert parse(server, **environ).listen == "tcp:5"
    assert parse(discovery, **environ).store == "memory:"


@pytest.mark.parametrize(
    ("module", "arguments", "line"),
    [
        (server, "", "dmsg-server: key: must be given (--key, DMSG_KEY, or [server] in --config)"),
        (
            messaging_server,
            "",
            "messaging-server: key: must be given (--key, DMSG_KEY, or [messaging-server] in --config)",
        ),
        (
            server,
            "--key k --limit-half-open 0",
            "dmsg-server: limits: half_open must be at least 1 (in option --limit-half-open)",
        ),
        (server, "--key k --limit-handshake-burst 0", "dmsg-server: limits: handshake_burst must be at least 1"),
        (
            messaging_server,
            "--key k --limit-stranger-request-burst 0",
            "messaging-server: limits: stranger_request_burst must be at least 1",
        ),
        (server, "--nonsense", "dmsg-server: option --nonsense not recognized"),
        (server, "more", "dmsg-server: takes options only, not 'more'"),
        (server, "--key /no/key", "dmsg-server: key: /no/key: No such file or directory; dmsg keygen makes one"),
        (server, f"--key {'ab' * 32}", "dmsg-server: key: a key is given as the path of a key file, never inline"),
        (server, "--key k --public-address x", "dmsg-server: public_address: must be host:port"),
        (
            server,
            "--key k --discovery http://d",
            "dmsg-server: public_address: must be given with discovery (--discovery, DMSG_",
        ),
        (discovery, "--listen tcp:x", "dmsg-discovery: listen: 'tcp:x' is no endpoint to listen on"),
        (discovery, "--listen nowhere:1", "dmsg-discovery: listen: 'nowhere:1' is no endpoint to listen on"),
        (discovery, "--admin tcp:x", "dmsg-discovery: admin: 'tcp:x' is no endpoint to listen on"),
        *(
            (
                discovery,
                f"--listen systemd:domain=INET:{which}",
                f"dmsg-discovery: listen: 'systemd:domain=INET:{which}' is no endpoint to listen on: "
                "systemd has given this program no such socket",
            )
            for which in ("index=0", "name=a.socket")
        ),
        (discovery, "--events ev --events-limit -1", "dmsg-discovery: events_limit: must not be negative"),
        (
            discovery,
            "--events ev --events-rotate-bytes 67108865",
            "dmsg-discovery: events_rotate_bytes: must be at most 67108864",
        ),
        *(
            (
                discovery,
                f"--store-limit-{which}-ttl-s 36526d",
                f"dmsg-discovery: store_limits: {which.replace('-', '_')}_ttl_s must be at most 100 years",
            )
            for which in ("server", "client", "base-client", "tombstone")
        ),
        (discovery, "--limit-connections x", "dmsg-discovery: limit_connections: must be a whole number"),
    ],
)
def test_mistakes_end_with_one_line(module: Any, arguments: str, line: str) -> None:
    assert refusal(module, *arguments.split()).startswith(line)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (None, "LISTEN_FDNAMES is not set"),
        ("a:b", "LISTEN_FDNAMES is a:b, so LISTEN_FDS must be 2 and LISTEN_PID this process"),
    ],
)
def test_why_a_socket_of_systemd_is_not_there_is_told(
    monkeypatch: pytest.MonkeyPatch, names: str | None, why: str
) -> None:
    monkeypatch.delenv("LISTEN_FDNAMES", raising=False)
    if names is not None:
        monkeypatch.setenv("LISTEN_FDNAMES", names)
    told = refusal(discovery, "--listen", "systemd:domain=INET:index=0")
    assert told.endswith(f": systemd has given this program no such socket: {why}")


def test_a_discovery_that_is_no_url_is_a_mistake_too(key_file: Any) -> None:
    where = f"--key {key_file(KEY)} --public-address 127.0.0.1:1 --discovery nowhere"
    assert refusal(server, *where.split()).startswith("dmsg-server: discovery: must be http://host:port, not 'nowhere'")


def test_a_key_file_others_can_read_is_refused(key_file: Any) -> None:
    path = key_file(KEY)
    path.chmod(0o644)
    assert "chmod 600" in refusal(server, "--key", str(path))


def test_services_are_made_without_touching_anything(tmp_path: Path, key_file: Any) -> None:
    made = server.makeService(_parsed(server, "--key", str(key_file(KEY)), "--listen", "tcp:0"))
    assert made.server is None
    store = tmp_path / "entries.db"
    found = discovery.makeService(_parsed(discovery, "--store", f"sqlite:{store}", "--events", str(tmp_path / "ev")))
    assert found.store is None and not store.exists()
    assert not list(tmp_path.glob("ev*"))  # a daemon is not yet the user whose directory it is to be


def test_help_and_version_come_from_the_declarations(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, expected in (("--help", "--public-address="), ("--version", "dmsg 0.")):
        with pytest.raises(SystemExit) as caught:
            parse(server, flag)
        assert not caught.value.code
        assert expected in capsys.readouterr().out


@pytest.mark.parametrize("columns", ["0", "1", "40", "-3", "wide", ""])
def test_the_help_is_given_on_every_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit):
        parse(server, "--help")
    assert "--public-address=" in capsys.readouterr().out


def test_endpoint_parsers_are_plugins_of_their_kind() -> None:
    for kind in (IPlugin, IStreamClientEndpointStringParserWithReactor, IStreamServerEndpointStringParser):
        assert verifyObject(kind, LazyParser("any", "somewhere"))


def test_endpoint_parsers_ask_their_module_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("strings_of_another_protocol")
    module.parse_client = lambda reactor, *args, **arguments: ("client", args, arguments)  # type: ignore[attr-defined]
    module.parse_server = lambda reactor, *args, **arguments: ("server", args, arguments)  # type: ignore[attr-defined]
    parser = LazyParser("other", module.__name__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert parser.prefix == "other"
    assert parser.parseStreamClient(None, "key", service="a") == ("client", ("key",), {"service": "a"})
    assert parser.parseStreamServer(None, service="a") == ("server", (), {"service": "a"})


def test_finding_the_plugins_loads_neither_a_role_nor_a_reactor() -> None:
    root = Path(__file__).parents[2]
    code = f"""
import runpy, sys
runpy.run_path({str(root / "twisted" / "plugins" / "dmsg_plugins.py")!r})
bad = {{"klein", "treq", "twisted.internet.reactor", "dmsg.taps.server", "dmsg.mux", "coincurve", "prometheus_client"}}
sys.exit(", ".join(sorted(bad & set(sys.modules))) or 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def test_loading_a_role_installs_no_reactor() -> None:
    code = "import sys, dmsg.taps.server, dmsg.taps.discovery; sys.exit('twisted.internet.reactor' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_a_discovery_lists_relays_of_dmsg_to_those_that_do_not_say_what_they_speak_unless_it_is_told_otherwise() -> (
    None
):
    assert parse(discovery).list_protocol == "dmsg"
    assert parse(discovery, "--list-protocol", "messaging").list_protocol == "messaging"
    with pytest.raises(SystemExit):
        parse(discovery, "--list-protocol", "other")


def test_a_discovery_proves_servers_unless_it_is_told_not_to() -> None:
    assert not parse(discovery).list_unproven and parse(discovery).private_addresses is None
    assert parse(discovery, "--list-unproven").list_unproven
    assert parse(discovery, "--private-addresses", "yes").private_addresses is True
    assert parse(discovery, DMSG_PRIVATE_ADDRESSES="no").private_addresses is False
    assert parse(discovery, "--proof-limit-interval-s", "60").proof_limits.interval_s == 60.0


@pytest.mark.system
@pytest.mark.parametrize("role", ["rmb-relay --domain localhost", "rmb-peer --key a.key --relay ws://127.0.0.1:1"])
@pytest.mark.parametrize("module", ["google", "mnemonic", "sr25519"])
def test_a_role_whose_extra_is_missing_says_so_in_one_line(tmp_path, role, module):
    words = ["twistd", "-n", "--pidfile=", *role.split(), "--registry", "twins.sqlite"]
    code = (
        f"import sys; sys.modules[{module!r}] = None; sys.argv = {words}; from twisted.scripts.twistd import run; run()"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert re.fullmatch(rf"{role.split()[0]}: extra rmb: \S+ is missing: install dmsg\[rmb\]\n", ended.stderr)


@pytest.mark.parametrize(
    ("relay", "problem"),
    [
        ("relay.example", "must be ws://host:port/path or wss://host:port/path"),
        ("https://relay.example:443", "must be ws://host:port/path or wss://host:port/path"),
        ("ws://relay.example/?token", "the URL of a relay has no query"),
    ],
)
def test_what_is_no_url_of_a_relay_is_refused(relay, problem):
    told = refusal(rmb_peer, "--registry", "twins.sqlite", "--key", "key", "--relay", relay)
    assert told.startswith("rmb-peer: relay: ") and problem in told


def test_the_help_of_a_relay_says_where_its_limits_are_explained_and_which_one_stands_in_for_an_option():
    usage = " ".join(server.Options().getUsage(width=200).split())
    assert "docs/reference/limits.rst" in usage
    assert "may go on after SIGTERM [limit_drain_timeout_s]" in usage
    assert (Path(__file__).parents[2] / "docs/reference/limits.rst").exists()


@pytest.mark.parametrize(
    ("module", "required"),
    [
        (server, ("--key", "key")),
        (messaging_server, ("--key", "key")),
        (discovery, ()),
        (rmb_relay, ("--registry", "twins.sqlite", "--domain", "localhost")),
    ],
)
def test_the_help_lists_limits_after_all_else_with_the_defaults_that_they_have(module, required):
    page, _, limits = module.Options().getUsage(width=100).partition("\nLimits and their defaults:\n")
    assert "--listen=" in page and not re.search(r"--\w*-?limit-\w", page)
    words = limits.split()
    assert len(words) > 20 and all(re.match(r"--((proof|store)-)?limit-", word) for word in words)
    given, default = parse(module, *required, *words), parse(module, *required)
    for one in settings_of(type(default)):
        value = attrgetter(".".join(one.path))(default)  # one is 1/60, which the help has with six digits
        expected = pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
        assert attrgetter(".".join(one.path))(given) == expected
