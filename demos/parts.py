"""The parts of the demonstrations: processes and their logs, files of random bytes, a working directory, a command."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import click

import dmsg
from dmsg.cli.exits import CommandError, Exit
from dmsg.cli.output import Output

MEBIBYTE: Final = 1024 * 1024
#: How to run a role of the framework, and a command of it, with this interpreter.
TWISTD: Final = (sys.executable, "-c", "from twisted.scripts.twistd import run; run()", "--nodaemon", "--pidfile=")
DMSG: Final = (sys.executable, "-m", "dmsg.cli.main")
#: How long a process may take to end when it is asked to, in seconds.
STOP_TIMEOUT_S: Final = 10.0
#: How long an answer over HTTP may take, in seconds.
ANSWER_TIMEOUT_S: Final = 20.0
_LOG_TAIL_LINES: Final = 25


class Role:
    """One process: its ``name``, its log and what it wrote to standard output."""

    def __init__(self, name: str, home: Path, command: list[str]) -> None:
        self.name = name
        self.log = home / f"{name}.log"
        self.results = home / f"{name}.out"
        root = str(Path(dmsg.__file__).resolve().parent.parent)
        # Variables for dmsg in the environment belong to another network.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DMSG_")}
        environment["DMSG_STATE_DIR"] = "none"  # its keys end with it
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
        with self.log.open("wb") as log, self.results.open("wb") as results:
            self.process = subprocess.Popen(
                command, cwd=home, env=environment, stdin=subprocess.DEVNULL, stdout=results, stderr=log
            )

    def lines(self) -> list[dict[str, Any]]:
        """The JSON objects it has written so far."""
        text = self.results.read_text("utf-8", "replace")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def tail(self) -> list[str]:
        """The last lines of what it wrote."""
        written = [path.read_text("utf-8", "replace") for path in (self.results, self.log)]
        return "".join(written).splitlines()[-_LOG_TAIL_LINES:]

    def kill(self) -> None:
        """End it without warning."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Ask it to end, and kill it if it does not."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()


class RoleFailed(CommandError):
    """A process ended, or did not become ready in time; its log tells why."""

    def __init__(self, role: Role, problem: str) -> None:
        super().__init__(f"{role.name}: {problem}")
        self.role = role


def ask(url: str) -> tuple[int, Any]:
    """Status and JSON of the answer of ``url``; status 0 without an answer, and no JSON with an error."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy leads to this machine
    try:
        with opener.open(url, timeout=ANSWER_TIMEOUT_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, None
    except OSError:
        return 0, None


def write_random(path: Path, size: int) -> str:
    """Fill a file with ``size`` random bytes; gives their SHA-256 in hex."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for start in range(0, size, MEBIBYTE):
            block = os.urandom(min(MEBIBYTE, size - start))
            digest.update(block)
            file.write(block)
    return digest.hexdigest()


def sha256(path: Path) -> str:
    """The SHA-256 of a file in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(MEBIBYTE):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def home(directory: str | None) -> Iterator[Path]:
    """The working directory: ``directory``, which must be empty and stays, or a temporary one. Raises ``CommandError``."""
    if directory is None:
        path = Path(tempfile.mkdtemp(prefix="dmsg-demo-"))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
    else:
        path = Path(directory).resolve()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise CommandError(f"{path} is not empty", Exit.USAGE)
        yield path


class Runs(Protocol):
    """A demonstration."""

    def run(self) -> None:
        """Run it; raises ``CommandError``."""


def demo_command(make: Callable[[Output, Path, int], Runs], summary: str) -> click.Command:
    """The command of a demonstration: ``make(output, home, size in bytes)`` gives it, ``summary`` is the help text."""

    @click.command(help=summary)
    @click.option(
        "--dir", "directory", type=click.Path(file_okay=False), help="Empty directory to work in, and to keep."
    )
    @click.option(
        "--size", type=click.IntRange(1, 4096), default=64, show_default=True, help="Size of the file in MiB."
    )
    @click.option("--json", "json_lines", is_flag=True, help="Write JSON, one object a line.")
    def command(directory: str | None, size: int, json_lines: bool) -> None:
        out = Output(sys.stdout, sys.stderr, json_lines=json_lines)
        began = time.monotonic()
        # When it is asked to end, it also ends its processes.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with home(directory) as path:
                make(out, path, size * MEBIBYTE).run()
        except CommandError as error:
            out.failure(error)
            sys.exit(error.exit)
        except KeyboardInterrupt:
            sys.exit(Exit.INTERRUPTED)
        out.note(f"demo: all well after {time.monotonic() - began:.1f} s")

    return command
