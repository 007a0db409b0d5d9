"""``dmsg relays``, and commands that are given a list of relays."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import pytest_twisted
from click.testing import CliRunner

from dmsg.cli.client import open_client
from dmsg.cli.commands import group
from dmsg.cli.exits import CommandError, Exit, describe, exit_code
from dmsg.cli.output import Output
from dmsg.cli.ping import run_echo
from dmsg.crypto.keys import PublicKey, SecretKey, write_key_file
from dmsg.relays.choice import RelaysMode
from dmsg.relays.errors import RelayListError

RELAY = SecretKey.generate().public_key


def dmsg(*arguments):
    return CliRunner().invoke(group, list(map(str, arguments)))


@pytest.fixture
def operator(tmp_path):
    key = SecretKey.generate()
    write_key_file(tmp_path / "operator.key", key)
    return key.public_key


def test_a_list_is_signed_and_shown(tmp_path, operator):
    other = SecretKey.generate().public_key
    signed = dmsg("relays", "sign", "--key", tmp_path / "operator.key", "--days", 7, f"{RELAY}@192.0.2.1:80", other)
    assert signed.exit_code == 0
    path = tmp_path / "relays.json"
    path.write_text(signed.stdout)
    shown = dmsg("relays", "show", path, "--relays-key", operator)
    assert sorted(shown.stdout.split()) == sorted([f"{RELAY}@192.0.2.1:80", str(other)])
    told = json.loads(dmsg("relays", "show", "--json", path, "--relays-key", operator).stdout)
    assert told["issuer"] == str(operator) and told["expires"] - told["issued"] == 7 * 24 * 3600
    refused = dmsg("relays", "show", path, "--relays-key", other)
    assert refused.exit_code == Exit.UNVERIFIED and "untrusted" in refused.stderr and not refused.stdout


@pytest.mark.parametrize("arguments", [[], ["nonsense"], [f"{RELAY}@nowhere"]])
def test_what_is_no_relay_is_not_signed(tmp_path, operator, arguments):
    assert dmsg("relays", "sign", "--key", tmp_path / "operator.key", *arguments).exit_code == Exit.USAGE


def test_a_relay_with_two_addresses_is_not_signed_with_one_of_them(tmp_path, operator):
    addresses = [f"{RELAY}@192.0.2.1:80", f"{RELAY}@192.0.2.2:80"]
    refused = dmsg("relays", "sign", "--key", tmp_path / "operator.key", *addresses)
    assert refused.exit_code == Exit.FAILED and "twice" in refused.stderr and not refused.stdout


def test_without_a_key_file_nothing_is_signed(tmp_path):
    refused = dmsg("relays", "sign", "--key", tmp_path / "none.key", RELAY)
    assert refused.exit_code == Exit.USAGE and not refused.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--relays", "list.json"], "relays_key"),
        (["--relays-mode", "only"], "relays_mode"),
        (["--relays", "list.json", "--relays-key", "02ab"], "66 hex digits"),
        (["--relays", "list.json", "--relays-key", str(RELAY), "--relays-mode", "all"], "one of prefer, only"),
    ],
)
def test_what_is_wrong_with_the_options_is_said(options, says):
    refused = dmsg("echo", "--discovery", "http://127.0.0.1:1", *options)
    assert refused.exit_code == Exit.USAGE and says in refused.stderr


# --- commands that use one -------------------------------------------------------------------------------------------


def given(bench, location, operator, mode=RelaysMode.ONLY):
    """Let every command of the bench have a list."""
    settings = bench.settings
    bench.settings = lambda *options: replace(
        settings(*options), relays=str(location), relays_keys=(operator,), relays_mode=mode
    )


@pytest.mark.parametrize("bench", ["http"], indirect=True)
@pytest_twisted.ensureDeferred
async def test_a_command_listens_at_the_relays_of_its_list_only(bench, tmp_path, operator):
    chosen = bench.pinned[-1]
    await bench.network.add_relay()
    path = tmp_path / "relays.json"
    path.write_text(dmsg("relays", "sign", "--key", tmp_path / "operator.key", chosen.public_key).stdout)
    given(bench, path, operator)
    for _ in range(3):
        echo = bench.start(run_echo)
        peer = PublicKey.parse((await echo.ready())["public_key"])
        entry = await bench.network.discovery.get_entry(peer)
        assert entry.client.delegated_servers == (chosen.public_key,)
        await echo.stop()


@pytest.mark.parametrize("bench", ["http"], indirect=True)
@pytest.mark.parametrize(
    ("spoil", "reason", "code"),
    [("missing", "unreadable", Exit.FAILED), ("stranger", "untrusted", Exit.UNVERIFIED)],
)
@pytest_twisted.ensureDeferred
async def test_without_a_good_list_a_command_says_why_and_uses_no_other_relay(
    bench, tmp_path, operator, spoil, reason, code
):
    path = tmp_path / "relays.json"
    if spoil == "stranger":
        write_key_file(tmp_path / "stranger.key", SecretKey.generate())
        path.write_text(dmsg("relays", "sign", "--key", tmp_path / "stranger.key", RELAY).stdout)
    given(bench, path, operator)
    with pytest.raises(RelayListError) as caught:
        await bench.run(run_echo)
    assert caught.value.reason == reason
    assert exit_code(caught.value) is code
    assert "the list of relays is not used" in describe(caught.value)


@pytest.mark.parametrize("bench", ["http"], indirect=True)
@pytest_twisted.ensureDeferred
async def test_a_preferred_list_that_is_missing_stops_nothing(bench, tmp_path, operator):
    given(bench, tmp_path / "none.json", operator, RelaysMode.PREFER)
    peer = PublicKey.parse((await bench.start(run_echo).ready())["public_key"])
    entry = await bench.network.discovery.get_entry(peer)
    assert entry.client.delegated_servers == (bench.pinned[0].public_key,)


@pytest.mark.parametrize("bench", ["http"], indirect=True)
@pytest.mark.parametrize("listening", [True, False])
@pytest_twisted.ensureDeferred
async def test_who_prefers_a_list_is_told_when_it_is_not_used(bench, tmp_path, operator, listening):
    path = tmp_path / "relays.json"
    path.write_text(dmsg("relays", "sign", "--key", tmp_path / "operator.key", RELAY).stdout)
    given(bench, path, RELAY, RelaysMode.PREFER)
    told = io.StringIO()
    async with open_client(bench.settings(), bench.reactor, listening=listening, out=Output(io.StringIO(), told)):
        pass
    assert told.getvalue().startswith("the list of relays is not used: untrusted: issued by ")
    assert told.getvalue().endswith("; going on with other relays\n")


@pytest.mark.parametrize("bench", ["http"], indirect=True)
@pytest_twisted.ensureDeferred
async def test_a_command_without_a_list_and_without_a_server_says_why(bench, tmp_path, operator, monkeypatch):
    monkeypatch.setattr("dmsg.cli.client.CONNECT_TIMEOUT_S", 0.2)
    given(bench, tmp_path / "none.json", operator, RelaysMode.PREFER)
    await bench.network.stop_relay(bench.relays[0])
    with pytest.raises(CommandError) as caught:
        await bench.run(run_echo)
    assert caught.value.exit is Exit.UNREACHABLE
    assert str(caught.value) == "no server within 0.2 s: discovery knows no server with room"
