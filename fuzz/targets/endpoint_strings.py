"""Endpoint strings of clients and servers, and the environment behind them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twisted.internet.endpoints import _parse, quoteStringArgument

from dmsg.clients.settings import MIN_SERVERS_LIMIT, TOGETHER
from dmsg.endpoints.arguments import read_arguments
from dmsg.errors import ConfigError
from dmsg.mux.client.endpoint import DmsgConnectArguments, DmsgListenArguments
from dmsg.mux.client.settings import ROLE, ClientSettings
from dmsg.ops.settings import settings_of
from dmsg.relays.choice import RelaysFrom, RelaysMode
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
    """Variables first, each by its number and with its length; the rest is the string. Raises only ``ConfigError``.

    Reads no files: other targets cover settings files and key files.
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
    named = {name.replace("_", "-"): value for name, value in given.items()}
    use = DmsgListenArguments if is_server else DmsgConnectArguments
    try:
        settings, read = read_arguments(given, ClientSettings, use, role=ROLE, environ=environment, together=TOGETHER)
        settings.relay_list()
    except ConfigError as error:
        assert error.option and str(error)
        _check_refusal(error, named, use)
        return
    listed = settings.relay_list()
    if settings.relays is None:
        assert listed is None and not settings.relays_keys and settings.relays_mode is None
    else:
        assert listed == RelaysFrom(settings.relays, settings.relays_keys, settings.relays_mode or RelaysMode.PREFER)
        assert settings.relays_keys
    for made, cls in ((settings, ClientSettings), (read, use)):
        for one in settings_of(cls):
            value: Any = made
            for name in one.path:
                value = getattr(value, name)
            if one.option not in named:
                assert cls is ClientSettings or value == one.default or isinstance(value, tuple)
            elif one.kind.many:
                # An empty list is refused, but not beside another one of its name.
                if named[one.option].replace(",", " ").split():
                    assert set(one.kind.parse(named[one.option])) <= set(value or ())
            elif not isinstance(value, (str, Path)):  # some texts are paths, and made absolute
                assert value == one.kind.parse(named[one.option])
    assert read.service == named.get("service", "")
    assert read.timeout is None or 0 < read.timeout < float("inf")
    assert (
        not isinstance(read, DmsgListenArguments) or read.idle_timeout is None or 0 < read.idle_timeout < float("inf")
    )
    assert settings.min_servers is None or 0 <= settings.min_servers < 1_000
    for server in settings.servers:
        assert str(server).isprintable()
    assert len(read.service.encode()) <= 255


def _check_refusal(error: ConfigError, named: dict[str, str], use: type) -> None:
    """An argument called unknown is unknown, and a refused number is malformed or too large."""
    if error.problem.startswith("unknown argument"):
        known = {one.option for one in (*settings_of(ClientSettings), *settings_of(use))}
        assert error.option.removesuffix("=") not in known
    number = named.get("min-servers", "")
    if error.option == "min_servers" and number.isascii() and number.isdigit() and len(number) < 9:
        assert int(number) > MIN_SERVERS_LIMIT
    if error.problem.startswith("there is no list of relays"):
        assert named.get("relays", "none").lower() == "none"
    if error.problem.startswith("say whose list of relays"):
        assert not any(name.startswith("relays-key") and value != "none" for name, value in named.items())


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
        f"dmsg:allow={key}:allow2={key}:server={server}:min-servers=3:timeout=2m:resume-grace-s=7:idle-timeout=1h",
        f"dmsg:{key}:server={server}:min_servers=3:timeout=500ms:service=none:resume_grace_s=7",
        f"dmsg:{key}:server={server}:relays=list.json:relays-key={key},{key}",
        f"dmsg:{key}:server={server}:relays=list.json:relays-key={key}:relays-mode=only",
        f"dmsg:{key}:server={server}:relays=list.json",
        f"dmsg:{key}:server={server}:relays-key={key}",
        f"dmsg:{key}:server={server}:relays-mode=only",
        f"dmsg:{key}:server={server}:min-servers=999",
        f"dmsg:{key}:server={server}:min-servers=1000",
        "dmsg:timeout=nan:server=x",
        "dmsg:timeout=1e400:security=",
        "dmsg:min-servers=١",
    ):
        yield b"\x00\x01" + text.encode()
        yield b"\x00\x00" + text.encode()
    yield b"\x02\x03\x04http\x04\x0310@" + b"\x01dmsg:service=a"
    yield b"\x01\x03\x15http://127.0.0.1:9090\x01dmsg:service=a"
    yield b"\x01\x00\x03hop\x00dmsg:service=a"
