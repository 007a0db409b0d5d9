"""Relays of others: found where they are said to be, and left out with a reason where they are not."""

from __future__ import annotations

import sys

import pytest

from benchmarks.others import LeftOut, find, run, serve, version_of
from benchmarks.processes import Cast, process_cpu_s
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
    path = program("sailboat", "print('sailboat v3.10.2-beta of 2020')")
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
