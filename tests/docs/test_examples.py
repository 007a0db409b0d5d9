"""What README, tutorial and how-to say can be run, run as they say it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from dmsg.eventlog.compress import read_lines
from dmsg.testing.process import free_port

from .conftest import DOCS, ROOT, Terminal, commands, runnable_blocks

pytestmark = [pytest.mark.system, pytest.mark.time_limit(180)]

#: What a command that goes on prints when the next may be typed.
READY = {"dmsg-discovery": "dmsg-discovery runs, on", "dmsg-server": "dmsg-server runs, on", "echo.py": "listening on"}


def write(terminal: Terminal, blocks: dict[str, str]) -> None:
    """Write the blocks that are files."""
    for name, body in blocks.items():
        if "." in name:
            (terminal.directory / name).write_text(body)


def free_ports(*written: str) -> dict[str, str]:
    """A free port for each of those that a page names."""
    return {port: str(free_port()) for port in written}


def with_ports(text: str, ports: Mapping[str, str]) -> str:
    """The text with other ports, all replaced at once: a free port may hold the digits of the next one that is written."""
    return re.sub(rf"\b(?:{'|'.join(ports)})\b", lambda found: ports[found[0]], text)


def test_no_port_is_replaced_in_another_one() -> None:
    ports = {"9090": "38080", "8080": "35445"}
    assert with_ports("on 9090 and 8080, not 80801", ports) == "on 38080 and 35445, not 80801"


def test_the_readme(terminal: Terminal) -> None:
    blocks = runnable_blocks(ROOT / "README.rst")
    assert set(blocks) == {"echo.py", "shell"}
    write(terminal, blocks)
    ports = free_ports("9090", "8080")
    output = ""
    for line in commands(blocks["shell"]):
        command = with_ports(line, ports)
        if command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            terminal.environ[name] = value
        elif command.endswith("&"):
            (until,) = (text for name, text in READY.items() if name in command)
            terminal.start(command.removesuffix("&"), until)
        else:
            output = terminal.run(command)
    assert "p50" in output, "the last command is a ping"


def test_the_readme_over_tcp(terminal: Terminal) -> None:
    write(terminal, runnable_blocks(ROOT / "README.rst"))
    assert "IPv4Address" in terminal.start(f"python echo.py tcp:{free_port()}:interface=127.0.0.1", "listening on")


def test_first_steps(terminal: Terminal, network: Callable[[], None]) -> None:
    blocks = runnable_blocks(DOCS / "tutorial" / "first-steps.rst")
    write(terminal, blocks)
    network()
    names = [terminal.run(command).split()[-1] for command in commands(blocks["keys"])]
    assert names[0] in terminal.start("python greeter.py dmsg:key=bob.key", "listening on")
    (command,) = commands(blocks["hello"])
    assert terminal.run(command).strip() == f"Hello Alice, known as {names[1][:8]}"


def test_embedding(terminal: Terminal, network: Callable[[], None]) -> None:
    write(terminal, runnable_blocks(DOCS / "tutorial" / "embed.rst"))
    network()
    lines = terminal.run("python embedded.py").splitlines()
    assert lines[0].startswith("through dmsg:")
    assert lines[1:] == ["HELLO", "as expected: no entry"]
    assert terminal.run("python web.py").strip() == "True"


def test_a_program_writes_an_event_log_of_its_own(terminal: Terminal, network: Callable[[], None]) -> None:
    write(terminal, runnable_blocks(DOCS / "howto" / "observe.rst"))
    network()
    assert terminal.run("python logged.py") == "connected\n"
    (path,) = (terminal.directory / "events").rglob("*.jsonl.zst")
    lines = read_lines(str(path))
    assert "session_up" in {json.loads(line)["event"] for line in lines}


def test_access_policies(terminal: Terminal, network: Callable[[], None]) -> None:
    write(terminal, runnable_blocks(DOCS / "tutorial" / "access-policy.rst"))
    network()
    assert terminal.run("python policy.py").splitlines() == [
        "alice was let in",
        "carol was not: access_denied",
        "alice was not: access_denied",
        "carol was let in",
    ]


def test_a_network_in_a_file(terminal: Terminal) -> None:
    text = with_ports(
        runnable_blocks(DOCS / "tutorial" / "own-network.rst")["network.toml"], free_ports("9090", "8080", "9100")
    )
    (terminal.directory / "network.toml").write_text(text)
    terminal.run("dmsg keygen relay.key")
    for role in ("dmsg-discovery", "dmsg-server"):
        terminal.start(f"twistd -n --pidfile= {role} --config network.toml", f"{role} runs, on")
    assert (terminal.directory / "events").is_dir()


def test_one_program_is_reached_in_both_protocols(terminal: Terminal) -> None:
    blocks = runnable_blocks(DOCS / "tutorial" / "two-protocols.rst")
    blocks["network.toml"] = with_ports(blocks["network.toml"], free_ports("9090", "8080", "8081"))
    write(terminal, blocks)
    for name in ("relay", "older", "me"):
        terminal.run(f"dmsg keygen {name}.key")
    for role in ("dmsg-discovery", "dmsg-server", "messaging-server"):
        terminal.start(f"twistd -n --pidfile= {role} --config network.toml", f"{role} runs, on")
    [url] = {line.split('"')[1] for line in blocks["network.toml"].splitlines() if line.startswith("discovery =")}
    terminal.environ["DMSG_DISCOVERY"] = url
    terminal.start("python both.py dmsg:key=me.key messaging:key=me.key", "listening on messaging:")
    for command in commands(blocks["pings"]):
        assert "p50" in terminal.run(command), command


def test_two_services_of_the_message_bus_call_each_other(terminal: Terminal) -> None:
    blocks = runnable_blocks(DOCS / "tutorial" / "rmb.rst")
    ports = free_ports("8080")
    blocks = {name: with_ports(body, ports) for name, body in blocks.items()}
    write(terminal, blocks)
    assert [terminal.run(command) for command in commands(blocks["twins"])] == ["1\n", "2\n"]
    (relay,) = commands(blocks["relay"])
    terminal.start(relay, "rmb-relay runs, on")
    (serve,) = commands(blocks["serve"])
    terminal.start(serve, "shout is served by twin 1")
    (call,) = commands(blocks["call"])
    assert terminal.run(call).strip() in blocks["call"]
    (greeter,) = commands(blocks["greeter"])
    printed = terminal.start(greeter, "as expected")
    assert printed.strip() == "\n".join(blocks["greeter"].strip().splitlines()[1:])
    (back,) = commands(blocks["back"])
    assert terminal.run(back).strip() == blocks["back"].strip().splitlines()[-1]


def test_the_tests_that_are_shown(terminal: Terminal) -> None:
    write(terminal, runnable_blocks(DOCS / "howto" / "test-your-program.rst"))
    output = terminal.run("python -m pytest -q -p no:cacheprovider test_program.py test_memory.py test_far_away.py")
    assert "3 passed" in output
    assert re.match(r"\d\.\d MB/s, pings \d+ ms\n\d+ bytes waited at the relay\n", terminal.run("python far_away.py"))


def test_every_block_that_says_so_is_run() -> None:
    """Each page with blocks that run is named in a test above."""
    source = Path(__file__).read_text()
    pages = [page for page in (*DOCS.rglob("*.rst"), ROOT / "README.rst") if ".. runnable:" in page.read_text()]
    assert len(pages) > 7
    assert [page for page in pages if f'"{page.name}"' not in source] == []


@pytest.mark.parametrize("page", sorted({*DOCS.rglob("*.rst"), ROOT / "README.rst"}), ids=lambda page: page.name)
def test_toml_and_python_that_is_shown_can_be_read(page: Path) -> None:
    """Blocks that are not run are at least what they say they are."""
    import sys
    import textwrap

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    found = re.findall(
        r"^\.\. code-block:: (python|toml)\n((?:   :.*\n)*)\n((?:(?:   .*)?\n)+)", page.read_text(), re.M
    )
    for language, _, body in found:
        code = textwrap.dedent(body)
        if language == "python":
            compile(code, str(page), "exec")
        else:
            assert tomllib.loads(code)
