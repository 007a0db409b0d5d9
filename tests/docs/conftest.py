"""The documentation as the tests see it: its generators, and the blocks of code in it that claim to run."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dmsg.testing.process import environ_without_settings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PATIENCE_S = 60.0

sys.path.insert(0, str(DOCS / "_ext"))

_RUNNABLE = re.compile(
    r"^\.\. runnable: (?P<name>\S+)\n\n\.\. code(?:-block)?:: \w+\n(?P<options>(?:   :.*\n)*)\n(?P<body>(?:(?:   .*)?\n)+)",
    re.MULTILINE,
)


def runnable_blocks(page: Path) -> dict[str, str]:
    """The blocks of a page under ``.. runnable: NAME``, by name."""
    text = page.read_text()
    blocks = {match["name"]: textwrap.dedent(match["body"]).strip() + "\n" for match in _RUNNABLE.finditer(text)}
    assert len(blocks) == text.count(".. runnable:"), f"a runnable block of {page} is not followed by code"
    return blocks


def commands(block: str) -> list[str]:
    """The command lines of a console block, continued lines joined."""
    return [line[2:] for line in block.replace("\\\n", " ").splitlines() if line.startswith("$ ")]


class Terminal:
    """A directory and an environment in which commands are run as a reader would."""

    def __init__(self, directory: Path, site: Path) -> None:
        self.directory = directory
        clean = environ_without_settings()
        path = os.pathsep.join((str(Path(sys.executable).parent), clean.get("PATH", "")))
        self.environ = {**clean, "PATH": path, "PYTHONPATH": str(site), "PYTHONUNBUFFERED": "1"}
        self._background: list[subprocess.Popen[bytes]] = []

    def run(self, command: str) -> str:
        """Run a command to its end and give its output; it has to succeed."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.directory,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE_S,
            check=False,
        )
        text = done.stdout.decode("utf-8", "replace")
        assert done.returncode == 0, f"{command}\n{text}"
        return text

    def start(self, command: str, until: str) -> str:
        """Run a command that goes on, and wait until it has printed ``until``; gives what it has printed."""
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=self.directory,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._background.append(process)
        assert process.stdout is not None
        text = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while until.encode() not in text or not text.endswith(b"\n"):
                assert selector.select(PATIENCE_S), f"{command} never printed {until!r}:\n{text.decode()}"
                piece = os.read(process.stdout.fileno(), 65536)
                assert piece, f"{command} ended:\n{text.decode()}"
                text += piece
        return text.decode("utf-8", "replace")

    def close(self) -> None:
        """End everything that still runs."""
        for process in reversed(self._background):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._background:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def terminal(tmp_path: Path, plugin_path: Path) -> Iterator[Terminal]:
    """A terminal in the test's directory; what runs in the background ends with the test."""
    one = Terminal(tmp_path, plugin_path)
    try:
        yield one
    finally:
        one.close()


@pytest.fixture
def network(terminal: Terminal) -> Callable[[], None]:
    """Starts ``dmsg up`` and tells the terminal where it is."""

    def start() -> None:
        text = terminal.start("dmsg up --relays 2", "# key of bob")
        terminal.environ["DMSG_DISCOVERY"] = text.partition("export DMSG_DISCOVERY=")[2].split()[0]

    return start
