"""``dmsg keygen`` and ``dmsg pubkey``."""

from __future__ import annotations

import json
import stat
import subprocess
import sys

import pytest
from click.testing import CliRunner

from dmsg.cli.commands import group
from dmsg.crypto.keys import PublicKey, read_key_file


def dmsg(*arguments):
    return CliRunner().invoke(group, list(map(str, arguments)))


def test_keygen_makes_a_file_for_its_owner_only(tmp_path):
    result = dmsg("keygen", tmp_path / "key")
    assert result.exit_code == 0
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert PublicKey.parse(result.stdout.strip()) == read_key_file(tmp_path / "key").public_key
    assert bytes(read_key_file(tmp_path / "key")).hex() not in result.output


def test_keygen_never_overwrites(tmp_path):
    dmsg("keygen", tmp_path / "key")
    before = (tmp_path / "key").read_bytes()
    result = dmsg("keygen", tmp_path / "key")
    assert result.exit_code == 1 and "already exists" in result.stderr and not result.stdout
    assert (tmp_path / "key").read_bytes() == before


def test_both_speak_json(tmp_path):
    made = json.loads(dmsg("keygen", "--json", tmp_path / "key").stdout)
    shown = json.loads(dmsg("pubkey", "--json", tmp_path / "key").stdout)
    assert made == shown == {"file": str(tmp_path / "key"), "public_key": str(PublicKey.parse(made["public_key"]))}


def test_pubkey_prints_the_public_half(tmp_path):
    made = dmsg("keygen", tmp_path / "key").stdout
    assert dmsg("pubkey", tmp_path / "key").stdout == made


@pytest.mark.parametrize("content", [None, b"", b"not a key", b"00" * 32])
def test_a_file_without_a_key_is_one_line_of_error(tmp_path, content):
    if content is not None:
        (tmp_path / "key").write_bytes(content)
        (tmp_path / "key").chmod(0o600)
    result = dmsg("pubkey", tmp_path / "key")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1 and "Traceback" not in result.stderr


def test_a_file_others_can_read_is_refused(tmp_path):
    dmsg("keygen", tmp_path / "key")
    (tmp_path / "key").chmod(0o644)
    result = dmsg("pubkey", "--json", tmp_path / "key")
    error = json.loads(result.stderr)
    assert result.exit_code == error["exit_code"] == 2 and error["error"] == "KeyFileError"


@pytest.mark.parametrize("arguments", [("ping", "zz"), ("ping",), ("nonsense",), ("keygen", "key", "--none")])
def test_a_wrong_command_line_is_json_for_programs(tmp_path, arguments):
    command = [sys.executable, "-m", "dmsg.cli.main", *arguments, "--json"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    told = json.loads(ended.stderr)
    assert (
        ended.returncode == told["exit_code"] == 2
        and told["message"]
        and set(told)
        == {
            "error",
            "message",
            "exit_code",
        }
    )


@pytest.mark.parametrize("arguments", [("keygen", "key"), ("--help",), ("keygen", "--help")])
def test_a_full_disk_at_standard_output_is_one_line_of_error(tmp_path, arguments):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "dmsg.cli.main", *arguments]
        ended = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "dmsg: standard output: No space left on device\n")
