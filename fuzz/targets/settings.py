"""Settings of the roles: from options, the environment and a TOML file."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from dmsg.errors import ConfigError
from dmsg.ops.config import resolve, trace
from dmsg.ops.settings import settings_of
from dmsg.taps.tables import SETTINGS
from fuzz.choices import Choices
from fuzz.oracles import as_text, scratch

DICTIONARY = (
    b"[server]\n",
    b"[discovery]\n",
    b"[server.limits]\n",
    b"[client.pool.race]\n",
    b" = ",
    b"inf",
    b"nan",
    b"1e400",
    b"0x",
    b"1979-05-27T07:32:00Z",
)

_ROLES = ("server", "discovery", "client", "shipper")


def one_input(data: bytes) -> None:
    """The first byte is the role, then come options and variables; the rest is the file.

    Raises only ``ConfigError``. Options override variables, which override the file, and the text of each value is
    read as the same value.
    """
    choices = Choices(data)
    role = _ROLES[choices.byte() & 3]
    cls = SETTINGS[role]
    settings = settings_of(cls)
    options: dict[str, str | None] = {}
    environment: dict[str, str] = {}
    for _ in range(choices.below(4)):
        one = choices.pick(settings)
        options[one.option] = as_text(choices.chunk())
    for _ in range(choices.below(4)):
        one = choices.pick(settings)
        environment[one.variable if choices.flag() else "DMSG_" + as_text(choices.chunk(8))] = as_text(choices.chunk())
    options["config"] = _file()
    with open(_file(), "wb") as file:
        file.write(choices.rest())
    try:
        made: Any = resolve(cls, role, options, environment, roles=SETTINGS)
    except ConfigError as error:
        assert error.option is not None and str(error)
        return
    assert isinstance(made, cls)
    texts: dict[str, str] = {}
    for value in trace(cls, role, options, environment, roles=SETTINGS):
        one = value.setting
        given = options.get(one.option)
        kinds = ("option",) if given is not None else ("environment",)
        if given is None:
            given = environment.get(one.variable) or None  # an empty one is as good as none
        assert value.origin.kind in (kinds if given is not None else ("file", "default"))
        if not isinstance(value.value, (Path, str)):
            for number in value.value if isinstance(value.value, tuple) else (value.value,):
                assert not isinstance(number, (int, float)) or 0 <= number < 2**63
            if given is not None:
                assert one.kind.parse(given) == value.value
        if value.origin.kind == "default":
            continue
        texts[one.option] = one.kind.text(value.value)
        assert one.kind.parse(texts[one.option]) == value.value
    assert resolve(cls, role, texts, {}, roles=SETTINGS) == made


@cache
def _file() -> str:
    return scratch("settings.toml")


def seeds() -> Iterator[bytes]:
    """Files of each role; borders of numbers; TOML that is nested, dated, long."""
    server = b'[server]\nkey = "server.key"\npublic_address = "192.0.2.1:80"\n[server.limits]\nconnections = 10\n'
    yield b"\x00\x00\x00" + server
    yield b"\x01\x00\x00" + server + b'[discovery]\nstore = "sqlite:x.db"\nlisten = "tcp:1"\n'
    for text in (b"nan", b"inf", b"-1", b"1e400", b"9" * 5_000, b"1979-05-27", b"[1]", b"true", b'"none"'):
        yield b"\x00\x00\x00" + server + b"requests_per_s = " + text + b"\n"
    for text in (b'"5m"', b'"500 ms"', b"2.5", b'"1h"', b"0"):
        yield b"\x00\x00\x00" + server + b"request_timeout_s = " + text + b"\n"
    for text in (b'"64MiB"', b'"2G"', b'"1kB"', b'"3TB"', b'"5B"', b"7", b'"none"', b"-1", b"true"):
        yield b"\x00\x00\x00" + server + b"queued_total_bytes = " + text + b"\n"
    yield b'\x02\x00\x00[client]\nserver = ["x"]\nresume_grace_s = "5m"\n[client.pool.race]\nwidth = 2\n'
    yield b'\x03\x00\x00[shipper]\nfrom = "a"\nto = "b"\noption = "a=b c.d=1"\n'
    yield b"\x00\x00\x00a = " + b"[" * 2_000 + b"]" * 2_000
    yield b"\x00\x00\x00" + b"a." * 1_500 + b"b = 1"
    yield b"\x00\x01\x06\x10" + b"x" * 16 + b"\x01\x08\x01\x03abc" + server
