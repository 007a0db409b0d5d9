"""The command as it is really run: processes, signals, exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import pytest_twisted
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread

from dmsg.crypto.keys import SecretKey, write_key_file
from dmsg.testing.process import Process, environ_without_settings

# Each starts several interpreters, which a busy machine may take its time over.
pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
NOWHERE = "http://127.0.0.1:1"


@pytest_twisted.ensureDeferred
async def test_a_local_network_and_everything_one_asks_of_it(start, tmp_path):
    up = start("up", "--json", "--relays", "2", "--dir", str(tmp_path / "home"))
    ready = await up.line()
    assert set(ready) == {"event", "discovery", "servers", "keys"} and len(ready["servers"]) == 2
    environ = {"DMSG_DISCOVERY": ready["discovery"]}

    listed = start("servers", "--json", environ=environ)
    echo = start("echo", "--json", "--key", ready["keys"]["alice"], environ=environ)
    code, out, _ = await listed.ended()
    assert code == 0
    assert {f"{one['public_key']}@{one['address']}" for one in json.loads(out)["servers"]} == set(ready["servers"])
    assert all(one["available"] > 0 for one in json.loads(out)["servers"])
    peer = (await echo.line())["public_key"]

    absent = str(SecretKey.generate().public_key)
    (tmp_path / "dmsg.toml").write_text(f'[client]\ndiscovery = "{ready["discovery"]}"\nsecurity = "e2e"\n')
    running = {
        "settings": start("config", "show", "--json", environ={"DMSG_CONFIG": "dmsg.toml"}),
        "by file": start("ping", peer, "--json", "--interval", "0", "--config", "dmsg.toml"),
        "ping": start("ping", peer, "--json", "--interval", "0", environ=environ),
        "entry": start("entry", peer, "--json", environ=environ),
        "plain servers": start("servers", environ=environ),
        "plain entry": start("entry", peer, environ=environ),
        "no entry": start("entry", absent, environ=environ),
        "no peer": start("ping", absent, "--json", environ=environ),
        "no discovery": start("entry", peer, "--discovery", NOWHERE),
        "nothing": start("ping", peer),
        "taken port": start("up", "--port", ready["discovery"].rpartition(":")[2]),
        "taken directory": start("up", "--dir", str(tmp_path / "home")),
    }
    ended = {name: await process.ended() for name, process in running.items()}
    assert {name: code for name, (code, _, _) in ended.items()} == {
        "settings": 0,
        "by file": 0,
        "ping": 0,
        "entry": 0,
        "plain servers": 0,
        "plain entry": 0,
        "no entry": 3,
        "no peer": 4,
        "no discovery": 6,
        "nothing": 2,
        "taken port": 1,
        "taken directory": 1,
    }
    assert json.loads(ended["ping"][1])["count"] == json.loads(ended["by file"][1])["count"] == 5
    shown = {one["setting"]: (one["value"], one["where"]) for one in json.loads(ended["settings"][1])["settings"]}
    assert shown["discovery"] == (ready["discovery"], f"{tmp_path / 'dmsg.toml'}:2")
    entry = json.loads(ended["entry"][1])
    assert entry["static"] == peer and entry["client"]["delegated_servers"]
    assert re.search(rf"^client via  {entry['client']['delegated_servers'][0]}$", ended["plain entry"][1], re.MULTILINE)
    assert {line.split()[0] for line in ended["plain servers"][1].splitlines()} == set(ready["servers"])
    assert json.loads(ended["no peer"][2])["attempts"][0]["stage"] == "discovery"
    for name in ("no entry", "no discovery", "nothing", "taken port", "taken directory"):
        assert len(ended[name][2].splitlines()) == 1, ended[name]
    assert f"{NOWHERE}: " in ended["no discovery"][2], "which discovery it was"
    assert ended["taken port"][2].endswith("Address already in use\n")
    assert ended["taken directory"][2] == f"dmsg: {tmp_path / 'home'} is in use: another dmsg up runs with it\n"
    assert len(json.loads(ended["no peer"][2])["attempts"]) == 1, (
        "without an entry there is nothing to say of its relays"
    )
    assert not any("Traceback" in err for _, _, err in ended.values())

    echo.send(signal.SIGHUP)
    code, out, err = await echo.ended()
    assert (code, err) == (130, "")
    for line in out.splitlines():
        opened = json.loads(line)
        assert (opened["event"], opened["security"]) == ("opened", "e2e")
    assert len(out.splitlines()) == 2
    up.send(signal.SIGTERM)
    assert await up.ended() == (130, "", "")
    again = start("up", "--json", "--relays", "2", "--dir", str(tmp_path / "home"))
    keys = [{one.partition("@")[0] for one in each["servers"]} for each in (ready, await again.line())]
    assert keys[0] == keys[1]
    again.send(signal.SIGKILL)  # so that the entries stay, with addresses at which nothing listens any more
    await again.ended()
    again = start("up", "--json", "--relays", "2", "--dir", str(tmp_path / "home"))
    restarted = await again.line()
    code, out, _ = await start("servers", "--json", "--discovery", restarted["discovery"]).ended()
    listed = {f"{one['public_key']}@{one['address']}" for one in json.loads(out)["servers"]}
    assert (code, listed) == (0, set(restarted["servers"]))
    again.send(signal.SIGTERM)
    assert await again.ended() == (130, "", "")
    kept = {path.name for path in (tmp_path / "home").iterdir()}
    assert {"relay-1.key", "relay-2.key", "alice.key", "bob.key", "entries.sqlite"} <= kept


@pytest_twisted.ensureDeferred
async def test_commands_talk_over_relays_of_the_messaging_system(start, tmp_path):
    messaging = ("--json", "--protocol", "messaging")
    up = start("up", *messaging)
    ready = await up.line()
    environ = {"DMSG_DISCOVERY": ready["discovery"]}
    (tmp_path / "inbox").mkdir()
    (tmp_path / "file").write_bytes(data := os.urandom(1_000_000))
    listed = start("servers", *messaging, environ=environ)
    others = start("servers", "--json", environ=environ)
    receiver = start("receive", "inbox", "--once", *messaging, environ=environ)
    echo = start("echo", *messaging, environ=environ)
    expose = start("expose", "tcp:127.0.0.1:1", *messaging, environ=environ)
    code, out, _ = await listed.ended()
    assert [f"{one['public_key']}@{one['address']}" for one in json.loads(out)["servers"]] == ready["servers"]
    assert (code, (await others.ended())[0]) == (0, 3), "a relay is listed for what it speaks"
    sender = start("send", (await receiver.line())["public_key"], "file", *messaging, environ=environ)
    ping = start("ping", (await echo.line())["public_key"], *messaging, environ=environ)
    forward = start(
        "forward",
        (await expose.line())["public_key"],
        "tcp:0:interface=127.0.0.1",
        *messaging,
        environ=environ,
    )
    for command in (sender, ping, receiver):
        code, out, err = await command.ended()
        assert code == 0, err
        told = json.loads(out.splitlines()[-1])
        assert (told["security"], told["server"]) == ("e2e", ready["servers"][0].partition("@")[0])
    assert (tmp_path / "inbox" / "file").read_bytes() == data
    await forward.line()
    for command in (echo, expose, forward, up):
        command.send(signal.SIGINT)
        code, _, err = await command.ended()
        assert (code, err) == (130, "")


@pytest.mark.parametrize("protocol", ["dmsg", "messaging"])
@pytest_twisted.ensureDeferred
async def test_what_up_prints_can_be_exported(start, tmp_path, protocol):
    up = start("up", "--protocol", protocol)
    lines = []
    while not (lines and lines[-1].startswith("# key of bob")):
        lines.append(await _text_line(up))
    assert re.fullmatch(r"export DMSG_DISCOVERY=http://127\.0\.0\.1:\d+\n", lines[0])
    assert ("# and give commands: --protocol messaging\n" in lines) is (protocol == "messaging")
    home = os.path.dirname(lines[-1].split()[-1])
    assert os.listdir(home)
    up.send(signal.SIGINT)
    code, _, err = await up.ended()
    assert code == 130 and "Traceback" not in err
    assert not os.path.exists(home)


async def _text_line(process):
    from twisted.internet.threads import deferToThread

    return await deferToThread(process.popen.stdout.readline)


@pytest.mark.parametrize("victim", ["receiver", "sender"])
@pytest_twisted.ensureDeferred
async def test_a_transfer_survives_the_death_of_either_end(bench, start, tmp_path, victim):
    data = os.urandom(24 * 1024 * 1024)
    (tmp_path / "file").write_bytes(data)
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    bench.key("receiver")
    bench.key("sender")
    environ = {"DMSG_SERVER": str(bench.pinned[0])}
    receive = ("receive", str(inbox), "--json", "--once", "--key", "receiver.key")
    receiver = start(*receive, environ=environ)
    send = ("send", (await receiver.line())["public_key"], str(tmp_path / "file"), "--json", "--key", "sender.key")
    sender = start(*send, environ=environ)
    part = None
    while part is None or part.stat().st_size < 1024 * 1024:
        await deferLater(bench.reactor, 0.001)
        part = next(iter(inbox.glob(".dmsg-parts/*.part")), None)
    dying = receiver if victim == "receiver" else sender
    dying.send(signal.SIGKILL)
    assert (await dying.ended())[0] == -signal.SIGKILL
    assert 0 < part.stat().st_size < len(data) and not (inbox / "file").exists()
    if victim == "receiver":
        receiver = start(*receive, environ=environ)
        await receiver.line()
    else:
        sender = start(*send, environ=environ)
    code, out, err = await sender.ended()
    assert code == 0, err
    assert json.loads(out)["resumed_from"] >= 1024 * 1024
    assert (await receiver.ended())[0] == 0
    assert (inbox / "file").read_bytes() == data
    assert [path.name for path in inbox.iterdir()] == ["file"]


@pytest_twisted.ensureDeferred
async def test_an_interrupted_command_says_nothing_and_ends_with_130(bench, start, tmp_path):
    environ = {"DMSG_SERVER": str(bench.pinned[0])}
    (tmp_path / "inbox").mkdir()
    commands = [
        start("receive", str(tmp_path / "inbox"), "--json", environ=environ),
        start("expose", "tcp:127.0.0.1:1", "--json", environ=environ),
        start("forward", str(bench.key("x")[0].public_key), "tcp:0:interface=127.0.0.1", "--json", environ=environ),
    ]
    for command in commands:
        await command.line()
        command.send(signal.SIGINT)
    assert [await command.ended() for command in commands] == [(130, "", "")] * 3


@pytest_twisted.ensureDeferred
async def test_a_thread_that_hangs_keeps_no_command_from_its_end(reactor):
    source = """
import sys, time
from dmsg.cli.output import Output
from dmsg.cli.runner import run

def hang():
    print("hangs", flush=True)
    time.sleep(100)

async def main(reactor):
    from twisted.internet.threads import deferToThread
    await deferToThread(hang)

sys.exit(run(main, Output(sys.stdout, sys.stderr)))
"""
    async with Process(reactor, [sys.executable, "-c", source], environ=environ_without_settings()) as program:
        await program.line("^hangs$")
        while program.status is None:
            program.signal(signal.SIGINT)
            await deferLater(reactor, 0.1)
        assert program.status == 130


@pytest_twisted.ensureDeferred
async def test_verbose_shows_a_traceback_and_nothing_else_does(start):
    peer = str(SecretKey.generate().public_key)
    quiet = start("entry", peer, "--discovery", NOWHERE)
    loud = start("entry", peer, "--discovery", NOWHERE, "--verbose")
    code, _, err = await quiet.ended()
    assert code == 6 and "Traceback" not in err
    code, _, err = await loud.ended()
    assert code == 6 and "Traceback" in err


def test_a_reader_that_has_gone_ends_nothing(tmp_path):
    write_key_file(tmp_path / "key", SecretKey.generate())
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "dmsg.cli.main", "pubkey", str(tmp_path / "key")]
    with os.fdopen(writer) as stdout:
        result = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, cwd=ROOT, timeout=30, check=False)
    assert (result.returncode, result.stderr) == (0, b"")


def test_a_reader_that_has_gone_is_no_error_for_results_that_go_out_as_they_are(tmp_path):
    write_key_file(tmp_path / "key", SecretKey.generate())
    reader, writer = os.pipe()
    os.close(reader)
    relay = str(SecretKey.generate().public_key)
    command = [sys.executable, "-m", "dmsg.cli.main", "relays", "sign", "--key", str(tmp_path / "key"), relay]
    with os.fdopen(writer) as stdout:
        result = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, cwd=ROOT, timeout=30, check=False)
    assert (result.returncode, result.stderr) == (0, b"")


@pytest.mark.parametrize("encoding", ["ascii:strict", "ascii:surrogateescape"])  # the latter in the C locale
@pytest_twisted.ensureDeferred
async def test_a_file_whose_name_standard_output_has_no_letters_for_is_received(bench, start, tmp_path, encoding):
    (tmp_path / "inbox").mkdir()
    (tmp_path / "файл").write_bytes(b"x")
    key, _ = bench.key("receiver")
    environ = {"DMSG_SERVER": str(bench.pinned[0]), "PYTHONIOENCODING": encoding}
    receiver = start("receive", str(tmp_path / "inbox"), "--key", "receiver.key", "--once", environ=environ)
    assert await deferToThread(receiver.popen.stdout.readline) == f"{key.public_key}\n"
    sender = start("send", str(key.public_key), str(tmp_path / "файл"), "--retries", "0", environ=environ)
    code, out, err = await sender.ended()
    assert code == 0 and out.startswith("sent \\u0444"), err
    code, out, err = await receiver.ended()
    assert code == 0 and out.startswith("received \\u0444"), err


@contextlib.contextmanager
def running(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, largest_file=-1):
    """``dmsg`` with ``arguments``, which may write no file of more bytes than ``largest_file``."""
    script = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({largest_file}, {largest_file}))"
    script += "; from dmsg.cli.main import main; main()"
    command = [sys.executable, "-B", "-c", script, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=stderr, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest_twisted.ensureDeferred
async def test_a_disk_that_becomes_full_under_the_results_ends_a_command_with_one_line(bench, tmp_path):
    key, path = bench.key("echo")
    arguments = ("echo", "--json", "--key", path, "--server", str(bench.pinned[0]), "--state-dir", "none")
    client = await bench.client()
    with open(tmp_path / "results", "w") as results, running(arguments, results, largest_file=200) as process:
        while not (tmp_path / "results").stat().st_size:
            await deferLater(bench.reactor, 0.01)
        for _ in range(2):  # of who it is only a part fits, then nothing
            await client.dial(key.public_key)
        _, errors = await deferToThread(process.communicate)
        assert process.returncode == 1
        assert json.loads(errors) == {"error": "OSError", "message": "standard output: File too large", "exit_code": 1}


@pytest_twisted.ensureDeferred
async def test_a_full_disk_at_standard_error_changes_nothing_but_that(bench):
    key, path = bench.key("echo")
    server = ("--server", str(bench.pinned[0]), "--state-dir", "none")
    with open("/dev/full", "w") as full:
        with running(("echo", "--key", path, *server), stderr=full) as process:
            await deferToThread(process.stdout.readline)
            with running(("ping", str(key.public_key), "--interval", "0", *server), stderr=full) as ping:
                out, _ = await deferToThread(ping.communicate)
                assert ping.returncode == 0 and out.startswith("rtt ")
            process.send_signal(signal.SIGTERM)
            assert await deferToThread(process.wait) == 130
        for arguments, code in ((("ping", "no-key"), 2), (("entry", str(key.public_key), "--discovery", NOWHERE), 6)):
            with running(arguments, stderr=full) as process:
                assert await deferToThread(process.wait) == code


def test_a_command_whose_streams_are_closed_works(tmp_path):
    def dmsg(*arguments, closed=""):
        command = shlex.join([sys.executable, "-m", "dmsg.cli.main", *arguments])
        environ = environ_without_settings() | {"PYTHONPATH": str(ROOT)}
        shell = ["sh", "-c", f"exec {command} {closed}"]
        return subprocess.run(shell, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)

    assert dmsg("rmb", "twin", "create", "--registry", "r", "--key", "k", "--relay", "x.example.org").returncode == 0
    call = ("rmb", "call", "1", "x", "--data", "-", "--key", "k", "--registry", "r", "--relay", "ws://127.0.0.1:1")
    ended = dmsg(*call, "--timeout", "0.5", closed="<&-")
    assert ended.returncode == 4 and len(ended.stderr.splitlines()) == 1, ended.stderr
    assert (ended := dmsg("pubkey", "nothing", closed="2>&-")).returncode == 2 and ended.stdout == ""


@pytest_twisted.ensureDeferred
async def test_the_demo_shows_that_everything_works(start, tmp_path):
    demo = start("--size", "2", "--dir", str(tmp_path / "demo"), module="demos.network")
    code, out, err = await demo.ended()
    assert code == 0, err
    assert "verified: 2.0 MiB" in out and "all well" in err
    rows = [line.split("\t") for line in out.splitlines() if "\t" in line]
    assert {row[0] for row in rows} == {"discovery", "relay-1", "relay-2", "receiver", "sender"}
    assert {"server_started", "discovery_request", "transport_opened", "dial_finished"} <= {row[2] for row in rows}
    again = start("--dir", str(tmp_path / "demo"), module="demos.network")
    assert (await again.ended())[0] == 2  # it is not empty any more


@pytest.mark.long
@pytest.mark.time_limit(300)
@pytest_twisted.ensureDeferred
async def test_the_demo_of_the_log_pipeline_verifies_its_lines(start, tmp_path):
    demo = start("--dir", str(tmp_path / "demo"), module="demos.analytics")
    code, out, err = await demo.ended()
    assert code == 0, err
    assert "the file has arrived unharmed" in err and "all well" in err
    lines = re.search(r"verified: (\d+) lines in, (\d+) good", out + err)
    assert lines is not None and lines[1] == lines[2] != "0"


def test_a_demo_that_fails_shows_the_log_of_what_failed(tmp_path, monkeypatch, capsys):
    from demos import network as demo
    from dmsg.cli.output import Output

    broken = (sys.executable, "-c", "print('the reason'); raise SystemExit(7)")
    monkeypatch.setattr(demo, "TWISTD", broken)
    with pytest.raises(demo.RoleFailed) as caught:
        demo.Demo(Output(sys.stdout, sys.stderr), tmp_path, 1).run()
    assert "discovery: ended with 7" in str(caught.value)
    assert "the reason" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["up", "servers", "echo"])
@pytest_twisted.ensureDeferred
async def test_a_command_takes_the_reactor_that_is_named_before_anything_installs_another(start, command):
    program = start(*command.split(), environ={"DMSG_REACTOR": "pol", "DMSG_DISCOVERY": NOWHERE})
    assert await program.ended() == (2, "", "dmsg: reactor: 'pol' is none; twistd --help-reactors lists them\n")


#: Ctrl-C when a module is about to be imported.
INTERRUPTED_AT = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
if {ignored}:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
from dmsg.cli.main import main
main()
"""


@pytest.mark.parametrize("module", ["click", "dmsg.crypto.keys", "dmsg.cli.keys", "dmsg.cli.rmb.relay_key"])
@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_while_a_command_is_imported_ends_it_in_silence(tmp_path, module, ignored):
    script = INTERRUPTED_AT.format(module=module, ignored=ignored)
    arguments = ["rmb", "relay-key", "--key", "key"] if "rmb" in module else ["keygen", "key"]
    command = [sys.executable, "-c", script, *arguments]
    environ = environ_without_settings() | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0 if ignored else 130, "")
    assert (tmp_path / "key").exists() == bool(ended.stdout) == ignored


def test_a_command_imports_what_it_needs_and_not_what_a_relay_does():
    script = (
        "import sys; from dmsg.cli.commands import group; group.main(['send', '--help'], standalone_mode=False);"
        "print(*(name for name in ('dmsg.serving.service', 'dmsg.cli.up', 'dmsg.cli.tunnels') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.splitlines()[-1] == ""
