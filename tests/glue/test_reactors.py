"""Which reactor a program of ours begins with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dmsg.glue.cpu_limit import has_cpu_limit

ROOT = Path(__file__).parents[2]


def installed(environ: dict[str, str], before: str = "") -> str:
    """The name of the class of the reactor after a program in ``environ`` has begun, or of the error."""
    source = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
{before}
from dmsg.glue.reactors import install_default
try:
    install_default({environ!r})
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
else:
    from twisted.internet import reactor
    print(type(reactor).__name__)
"""
    return subprocess.run([sys.executable, "-c", source], text=True, capture_output=True, check=True).stdout.strip()


def test_a_program_of_ours_runs_on_our_own_reactor() -> None:
    assert installed({}) == "LeanEpollReactor"


def test_the_environment_names_another() -> None:
    assert installed({"DMSG_REACTOR": "poll"}) == "PollReactor"
    assert installed({"DMSG_REACTOR": "dmsg-epoll"}) == "LeanEpollReactor"


def test_ours_can_be_had_asleep() -> None:
    """Which of the two it is shows in ``sleeps``."""
    shown = "import atexit; atexit.register(lambda: print(sys.modules['twisted.internet.reactor'].sleeps))"
    assert installed({"DMSG_REACTOR": "dmsg-epoll-sleep"}, shown) == "LeanEpollReactor\nTrue"
    assert installed({}, shown) == f"LeanEpollReactor\n{has_cpu_limit()}"


def test_one_that_cannot_be_had_is_a_mistake_in_the_settings() -> None:
    unknown = "ConfigError: reactor: 'pol' is none; twistd --help-reactors lists them"
    assert installed({"DMSG_REACTOR": "pol"}) == unknown
    assert installed({"DMSG_REACTOR": "win32"}).startswith("ConfigError: reactor: 'win32' cannot be used: ")


def test_the_one_that_is_there_stays() -> None:
    chosen = "from twisted.internet import selectreactor; selectreactor.install()"
    assert installed({}, chosen) == installed({"DMSG_REACTOR": "poll"}, chosen) == "SelectReactor"


def test_where_there_is_no_epoll_twisted_chooses() -> None:
    without = "import select; del select.epoll; sys.modules['twisted.internet.epollreactor'] = None"
    assert installed({}, without) == "PollReactor"
