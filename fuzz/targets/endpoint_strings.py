"""Endpoint strings of clients and servers, and the environment behind them."""

from __future__ import annotations

from collections.abc import Iterator

from twisted.internet.endpoints import _parse, quoteStringArgument

from dmsg.clients.settings import TOGETHER
from dmsg.endpoints.arguments import read_arguments
from dmsg.errors import ConfigError
from dmsg.mux.client.endpoint import DmsgConnectArguments, DmsgListenArguments
from dmsg.mux.client.settings import ROLE, ClientSettings
from fuzz.choices import Choices
from fuzz.oracles import KEYS, as_text

DICTIONARY = (
    b"dmsg:",
    b":server=",
    b":discovery=",
    b":service=",
    b":security=hop",
    b":timeout=",
    b":allow=",
    b"\\:",
    b"http\\://",
)

_VARIABLES = (
    "DMSG_SECURITY",
    "DMSG_RANKS_KEY",
    "DMSG_STATE_DIR",
    "DMSG_DISCOVERY",
    "DMSG_SERVER",
)


def one_input(data: bytes) -> None:
    """Variables first, each by its number and with its length; the rest is the string. Only ``ConfigError`` leaves.

    No file is read: settings files and key files are those of other targets.
    """
    choices = Choices(data)
    environment: dict[str, str] = {}
    for _ in range(choices.below(4)):
        environment[choices.pick(_VARIABLES)] = as_text(choices.chunk())
    is_server = choices.flag()
    text = as_text(choices.rest())
    try:
        _, given = _parse(text)
    except (ValueError, IndexError, RuntimeError):  # Twisted's own: a backslash at the end, too
        return
    given.pop("config", None)
    use = DmsgListenArguments if is_server else DmsgConnectArguments
    try:
        settings, read = read_arguments(given, ClientSettings, use, role=ROLE, environ=environment, together=TOGETHER)
        settings.relay_list()
    except ConfigError as error:
        assert error.option and str(error)
        return
    assert read.timeout is None or 0 < read.timeout < float("inf")
    assert (
        not isinstance(read, DmsgListenArguments) or read.idle_timeout is None or 0 < read.idle_timeout < float("inf")
    )
    assert settings.min_servers is None or 0 <= settings.min_servers < 1_000
    for server in settings.servers:
        assert str(server).isprintable()
    assert len(read.service.encode("utf-8", "surrogatepass")) <= 255


def seeds() -> Iterator[bytes]:
    """Strings with each argument, quoted colons, several servers, an environment."""
    key = KEYS[0].public_key
    server = quoteStringArgument(f"{key}@192.0.2.1:80")
    discovery = quoteStringArgument("http://127.0.0.1:9090")
    for text in (
        f"dmsg:{key}:server={server}:service=chat:security=e2e:timeout=5",
        f"dmsg:{key}:discovery={discovery}:min-servers=2:state-dir=none:ranks-key={key}",
        f"dmsg:allow={key},{key}:idle-timeout=30:discovery={discovery}:key=file",
        f"dmsg:server={server},{server}:server2={server}:security=hop",
        "dmsg:timeout=nan:server=x",
        "dmsg:timeout=1e400:security=",
        "dmsg:min-servers=١",
    ):
        yield b"\x00\x01" + text.encode()
        yield b"\x00\x00" + text.encode()
    yield b"\x02\x03\x04http\x04\x0310@" + b"\x01dmsg:service=a"
    yield b"\x01\x03\x15http://127.0.0.1:9090\x01dmsg:service=a"
    yield b"\x01\x00\x03hop\x00dmsg:service=a"
