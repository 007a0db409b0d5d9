"""Relays of others: found where they are said to be, and left out with a reason where they are not."""

from __future__ import annotations

import sys

import pytest

from benchmarks import beside
from benchmarks.others import LeftOut, files, find, run, serve, version_of
from benchmarks.processes import Cast, process_cpu_s
from benchmarks.sizes import TINY
from dmsg.testing.process import free_port


@pytest.fixture
def program(tmp_path, monkeypatch):
    """``program(name, source)``: a Python program that is installed where only BENCH_OTHERS says."""

    def make(name, source):
        path = tmp_path / name
        path.write_text(f"#!{sys.executable}\n{source}\n")
        path.chmod(0o755)
        monkeypatch.setenv("BENCH_OTHERS", str(tmp_path))
        return str(path)

    return make


def test_programs_are_found_in_directories_of_their_own(program):
    path = program("sailboat", "print('built at 12:01:14.25; sailboat v3.10.2-beta')")
    assert find("sailboat") == path
    assert version_of(path) == "3.10.2"


def test_what_is_not_installed_is_left_out():
    with pytest.raises(LeftOut, match="sailboat is not installed"):
        find("sailboat")


def test_what_fails_is_left_out_with_the_last_it_said(program):
    path = program("sailboat", "import sys; print('one'); sys.exit('no wind')")
    with pytest.raises(LeftOut, match="sailboat ended with 1: no wind"):
        run([path])
    with pytest.raises(LeftOut, match="does not run"):
        run(["/nowhere/sailboat"])


LISTEN = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
time.sleep(1000)
"""


def test_a_relay_runs_until_the_bench_ends(program):
    path, port = program("sailboat", LISTEN), free_port()
    with Cast() as cast:
        process = serve(cast, [path, str(port)], port)
        assert process.poll() is None
        assert process_cpu_s(process.pid) > 0
    assert process.poll() is not None


def test_a_relay_that_ends_at_once_is_left_out(program):
    path = program("sailboat", "")
    with Cast() as cast, pytest.raises(LeftOut, match="does not listen"):
        serve(cast, [path], free_port())


CROC = """
import os, pathlib, shutil, socket, sys, time
words, note = sys.argv[1:], pathlib.Path(__file__).with_name("note")
if words[0] == "--version":
    print("croc version 10.7.0")
elif words[0] == "relay":
    server = socket.create_server((words[4], int(words[2])))
    time.sleep(1000)
elif "send" in words:
    note.write_text(os.environ["CROC_SECRET"] + "=" + words[-1])
else:
    secret, path = note.read_text().split("=")
    assert secret == os.environ["CROC_SECRET"]
    sys.exit("no such file") if path.endswith("missing") else shutil.copy(path, ".")
"""


def test_a_file_is_sent_by_one_command_and_received_by_another(program, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_HEAD_START_S", 0.5)
    program("croc", CROC)
    (tmp_path / "file").write_text("content")
    (tmp_path / "in").mkdir()
    with Cast() as cast:
        croc = files.Croc(cast, files.Way(cast))
        assert croc.name == "croc 10.7.0"
        assert 0 < croc.send(tmp_path / "file", tmp_path / "in") < 30
        assert (tmp_path / "in" / "file").read_text() == "content"
        with pytest.raises(LeftOut, match=r"croc ended with .*no such file"):
            croc.send(tmp_path / "missing", tmp_path / "in")


@pytest.mark.long
@pytest.mark.system
@pytest.mark.time_limit(90)
def test_ours_is_measured_alone_where_nothing_else_is_installed(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("BENCH_OTHERS", raising=False)
    rows = beside.run(TINY)
    assert all(row.value > 0 for row in rows)
    names = " ".join(row.name for row in rows)
    for ours in ("dmsg, hop", "dmsg, e2e", "tunnel", "a file of 1 MiB"):
        assert ours in names
    left_out = [f"left out: {program} is not installed" for program in ("croc", "derper", "rathole", "wormhole")]
    assert capsys.readouterr().err.splitlines() == left_out
