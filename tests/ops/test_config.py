"""Settings: four sources in their order, every mistake named with its place, no secret in any message."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.address import HostPort
from dmsg.errors import ConfigError
from dmsg.ops.config import resolve
from dmsg.ops.settings import describe_default, setting, settings_of, variables_of

KEY = "ab" * 32


@dataclass(frozen=True, slots=True)
class Limits:
    connections: int = 100
    rate_per_s: float = 2.5
    burst: float | None = None

    def __post_init__(self) -> None:
        if self.connections == 13:
            raise ValueError("thirteen is unlucky")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    key: Path | None = setting("key file", default=None, key_file=True)
    listen: str = setting("endpoint", default="tcp:1")
    public_address: HostPort | None = setting("address", default=None)
    store: str = setting("store", default="memory:", secret=True)
    fast: bool = setting("fast", default=False)
    target: str | None = setting("target", default=None, may_be_path=True)
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demanding:
    name: str = setting("name")


def get(
    options: dict[str, str] | None = None, environ: dict[str, str] | None = None, cls: Any = Settings, **extra: Any
) -> Any:
    return resolve(cls, "server", options or {}, environ or {}, **extra)


def write(directory: Path, text: str) -> str:
    path = directory / "dmsg.toml"
    path.write_text(text)
    return str(path)


def test_one_declaration_gives_all_the_names() -> None:
    named = {one.name: (one.option, one.variable, one.path) for one in settings_of(Settings)}
    assert named["public_address"] == ("public-address", "DMSG_PUBLIC_ADDRESS", ("public_address",))
    assert named["limit_rate_per_s"] == ("limit-rate-per-s", "DMSG_LIMIT_RATE_PER_S", ("limits", "rate_per_s"))
    assert variables_of(Settings) >= {"DMSG_KEY", "DMSG_LIMIT_BURST"}
    assert [describe_default(one) for one in settings_of(Demanding)] == ["required"]


def test_defaults() -> None:
    assert get() == Settings()


def test_each_source_wins_over_those_after_it(tmp_path: Path) -> None:
    config = write(
        tmp_path, '[server]\nlisten = "tcp:2"\nstore = "file"\nfast = true\n[server.limits]\nconnections = 7\n'
    )
    environ = {"DMSG_CONFIG": config, "DMSG_LISTEN": "tcp:3", "DMSG_LIMIT_CONNECTIONS": "8", "HOME": "/"}
    made = get({"listen": "tcp:4"}, environ)
    assert (made.listen, made.store, made.fast) == ("tcp:4", "file", True)
    assert made.limits == Limits(connections=8)
    assert get({}, environ).listen == "tcp:3"
    assert get({"config": config}).listen == "tcp:2"


def test_an_option_names_the_file_rather_than_the_environment(tmp_path: Path) -> None:
    config = write(tmp_path, '[server]\nlisten = "tcp:2"\n')
    assert get({"config": config}, {"DMSG_CONFIG": "/nowhere"}).listen == "tcp:2"


def test_values_have_their_types() -> None:
    made = get(
        {
            "public-address": "[::1]:80",
            "fast": "On",
            "limit-connections": "5",
            "limit-rate-per-s": "0.5",
            "limit-burst": "none",
        }
    )
    assert made.public_address == HostPort("::1", 80)
    assert made.fast is True
    assert made.limits == Limits(5, 0.5, None)
    assert get({"limit-burst": "3"}).limits.burst == 3.0


def test_paths_count_from_where_they_were_written(tmp_path: Path) -> None:
    config = write(tmp_path, '[server]\nkey = "secret/key"\n')
    assert get({"config": config}).key == tmp_path / "secret" / "key"
    assert get({"key": "key"}).key == Path(os.getcwd(), "key")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("logs", "{}/logs"),
        ("../logs", "{}/../logs"),
        ("a b?c", "{}/a b?c"),
        ("/logs", "/logs"),
        ("sqlite:entries.db", "sqlite:{}/entries.db"),
        ("sqlite:/entries.db", "sqlite:/entries.db"),
        *((other, other) for other in ("-", "memory:", "sqlite:", "redis://host/0", "https://host/a", "s3://bucket/a")),
    ],
)
def test_a_text_that_may_be_a_path_counts_from_there_too(tmp_path: Path, written: str, meant: str) -> None:
    config = write(tmp_path, f'[server]\ntarget = "{written}"\n')
    for directory, made in ((tmp_path, get({"config": config})), (os.getcwd(), get({"target": written}))):
        scheme, path, rest = meant.partition("{}")
        assert made.target == (scheme + os.path.abspath(f"{directory}{rest}") if path else meant)
    assert get({"target": "none"}).target is None


def test_without_a_working_directory_only_relative_paths_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert get({"key": "/etc/key", "listen": "tcp:1"}, {"DMSG_FAST": "1"}).key == Path("/etc/key")
    for options, option in (({"key": "me.key"}, "key"), ({"config": "dmsg.toml"}, "config")):
        with pytest.raises(ConfigError, match="the working directory is gone") as caught:
            get(options)
        assert caught.value.option == option


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit-connections": "many"}, "limit_connections: must be a whole number, not 'many' (in option --limit-c"),
        ({"limit-connections": "-1"}, "limit_connections: must not be negative"),
        ({"limit-rate-per-s": "nan"}, "limit_rate_per_s: must be a finite number"),
        ({"limit-rate-per-s": "1e999"}, "limit_rate_per_s: must be a finite number"),
        ({"public-address": "nowhere"}, "public_address: must be host:port"),
        ({"fast": "maybe"}, "fast: must be yes or no, not 'maybe'"),
        ({"listen": ""}, "listen: must be a text that is not empty"),
        ({"limit-connections": "13"}, "limits: thirteen is unlucky"),
        ({"config": "/no/such/file"}, "config: No such file or directory (in /no/such/file)"),
    ],
)
def test_malformed_values_are_named_with_their_source(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        get(options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "option", "message"),
    [
        ('[server]\nlissen = "x"', "lissen", "did you mean listen?"),
        ("[server.limits]\nconections = 1", "conections", "did you mean connections? (in [server.limits] of "),
        ("[sever]\n", "sever", "is no table; there are [client], [server]"),
        ("listen = 1\n", "listen", "is no table"),
        ("server = 1\n", "server", "must be a table"),
        ("[server]\nlimits = 3\n", "server.limits", "must be a table"),
        ("[server]\nlisten = 3\n", "listen", "must be a text"),
        ('[server]\nlisten = "a\\u0000"\n', "listen", "must not have a null character"),
        ('[server]\nkey = "a\\u0000"\n', "key", "must not have a null character"),
        ("[server]\nfast = 3\n", "fast", "must be yes or no"),
        ("[server]\npublic_address = 3\n", "public_address", "must be host:port"),
        ("[server.limits]\nconnections = 1.5\n", "limit_connections", "must be a whole number"),
        ("[server.limits]\nconnections = true\n", "limit_connections", "must be a whole number"),
        ("[server.limits]\nrate_per_s = true\n", "limit_rate_per_s", "must be a number"),
        ("[server.limits]\nconnections = []\n", "limit_connections", "must be a whole number"),
        ("[server\n", "config", "is not TOML"),
        (f"[server.limits]\nconnections = {'9' * 5_000}\n", "config", "is not TOML"),
        (f"a = {'[' * 2_000}", "config", "is not TOML"),
        ("\ud800", "config", "is not TOML"),
        (f'[server]\nsecret_key = "{KEY}"\n', "secret_key", "never inline"),
        (f'[server]\nkey = "{KEY}"\n', "key", "never inline"),
        ("#" * (1024 * 1024 + 1), "config", "too long"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, text: str, option: str, message: str) -> None:
    path = tmp_path / "dmsg.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError) as caught:
        get({"config": str(path)}, roles={"server", "client"})
    assert caught.value.option == option
    assert message in str(caught.value) and str(path) in str(caught.value)
    assert KEY not in str(caught.value)


def test_tables_of_other_roles_may_stand_beside_ours(tmp_path: Path) -> None:
    config = write(tmp_path, '[client]\nanything = 1\n[server]\nlisten = "tcp:2"\n')
    assert get({"config": config}, roles={"client"}).listen == "tcp:2"


def test_unknown_variables_with_our_prefix_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"DMSG_LISTN: is no setting; did you mean DMSG_LISTEN\?"):
        get({}, {"DMSG_LISTN": "x"})
    assert get({}, {"DMSG_OTHER": "x", "DM": "y"}, elsewhere=lambda: {"DMSG_OTHER"}) == Settings()


def test_what_is_required_must_be_given() -> None:
    with pytest.raises(ConfigError, match=r"name: must be given \(--name, DMSG_NAME, or \[server\] in --config\)"):
        get(cls=Demanding)
    assert get({"name": "x"}, cls=Demanding).name == "x"


@pytest.mark.parametrize("key", [KEY, KEY.upper(), f"0x{KEY}", f" {KEY}\n"])
@pytest.mark.parametrize("place", ["key", "DMSG_KEY", "DMSG_SECRET_KEY"])
def test_a_key_given_inline_is_refused_and_not_repeated(key: str, place: str) -> None:
    with pytest.raises(ConfigError, match="never inline") as caught:
        get(*(({}, {place: key}) if place.startswith("DMSG") else ({place: key}, {})))
    assert KEY not in str(caught.value).lower()


def test_a_secret_value_is_not_repeated(tmp_path: Path) -> None:
    config = write(tmp_path, "[server]\nstore = 123454321\n")
    with pytest.raises(ConfigError) as caught:
        get({"config": config})
    assert "123454321" not in str(caught.value)


@given(st.dictionaries(st.sampled_from([one.option for one in settings_of(Settings)]), st.text(max_size=20)))
def test_any_text_gives_settings_or_a_config_error(options: dict[str, str]) -> None:
    try:
        assert isinstance(get(options), Settings)
    except ConfigError as error:
        assert error.option
