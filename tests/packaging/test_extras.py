"""Each way to use the Reliable Message Bus says what is missing when the extra ``rmb`` is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: What is wrong -> how a process gets there, and how it is told.
WRONG = {
    "no google": ("sys.modules['google'] = None", "protobuf is missing"),
    "another package of google": ("sys.modules['google.protobuf'] = None", "protobuf is missing"),
    "an old protobuf": (
        "from google.protobuf import runtime_version; "
        "runtime_version.MAJOR, runtime_version.OSS_MAJOR = 5, 5; "
        "runtime_version.ValidateProtobufRuntimeVersion = lambda *_: runtime_version._ReportVersionError('old')",
        "protobuf is too old",
    ),
    "no mnemonic": ("sys.modules['mnemonic'] = None", "mnemonic is missing"),
    "no sr25519": ("sys.modules['sr25519'] = None", "py-sr25519-bindings is missing"),
}


def run(cwd: Path, wrong: str, code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import sys; {WRONG[wrong][0]}; {code}"]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.system
@pytest.mark.parametrize("wrong", WRONG)
def test_a_program_that_imports_the_client_is_told(tmp_path: Path, wrong: str) -> None:
    ended = run(tmp_path, wrong, "import dmsg.rmb.client.service")
    said = f"{WRONG[wrong][1]}: install dmsg[rmb]"
    assert ended.stderr.splitlines()[-1] == f"dmsg.rmb.core.errors.LibraryMissing: {said}"
    caught = "\ntry:\n    import dmsg.rmb.client.service\nexcept ImportError as error:\n    print(error)"
    assert run(tmp_path, wrong, caught).stdout == said + "\n"


@pytest.mark.system
@pytest.mark.parametrize("wrong", WRONG)
def test_a_user_of_the_command_is_told_in_one_line(tmp_path: Path, wrong: str) -> None:
    code = f"sys.argv = {['dmsg', 'rmb', 'call', '1', 'x']}; from dmsg.cli.main import main; main()"
    ended = run(tmp_path, wrong, code)
    assert (ended.returncode, ended.stderr) == (1, f"Error: {WRONG[wrong][1]}: install dmsg[rmb] to use dmsg rmb\n")


@pytest.mark.system
@pytest.mark.parametrize("wrong", WRONG)
def test_an_operator_is_told_in_one_line(tmp_path: Path, wrong: str) -> None:
    words = ["twistd", "-n", "--pidfile=", "rmb-relay", "--domain", "localhost", "--registry", "twins.sqlite"]
    ended = run(tmp_path, wrong, f"sys.argv = {words}; from twisted.scripts.twistd import run; run()")
    assert (ended.returncode, ended.stderr) == (1, f"rmb-relay: extra rmb: {WRONG[wrong][1]}: install dmsg[rmb]\n")
