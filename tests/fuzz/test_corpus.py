"""Everything that fuzzing has ever found worth keeping, once more; without a fuzzer."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: An input is a few microseconds to a few milliseconds of work; no input may be one that takes a machine's second away.
INPUT_TIME_S = 1.0
#: All of it lies in the repository.
KEPT_BYTES = 2_000_000
#: The log pipeline has its own tests, which replay this one.
ELSEWHERE = {"plain_lines"}


@pytest.fixture(scope="module", autouse=True)
def _path() -> object:
    """The targets stand beside the tests, outside of every package that is installed."""
    sys.path.insert(0, str(ROOT))
    yield
    sys.path.remove(str(ROOT))


def _names() -> list[str]:
    return sorted(path.stem for path in (ROOT / "fuzz" / "targets").glob("[a-z]*.py") if path.stem not in ELSEWHERE)


@pytest.mark.parametrize("name", _names())
def test_every_input_of_the_corpus_keeps_the_promises(name: str) -> None:
    one_input = importlib.import_module("fuzz.targets").load(name).one_input
    for origin, data in importlib.import_module("fuzz.corpus").inputs(name):
        began = time.thread_time()
        try:
            one_input(data)
        except Exception as error:
            raise AssertionError(f"{name}: {origin}: {data[:100]!r}") from error
        assert time.thread_time() - began < INPUT_TIME_S, f"{name}: {origin}"


def test_each_target_has_seeds_and_all_is_small() -> None:
    targets, corpus = (importlib.import_module(f"fuzz.{name}") for name in ("targets", "corpus"))
    for name in _names():
        assert list(targets.load(name).seeds()), name
    files = [
        path for folder in ("corpus", "findings") for path in (corpus.FOLDER / folder).rglob("*") if path.is_file()
    ]
    assert sum(path.stat().st_size for path in files) < KEPT_BYTES
    known = {*_names(), *ELSEWHERE}
    assert {path.stem for path in (corpus.FOLDER / "corpus").glob("*")} <= known
    assert {path.name for path in (corpus.FOLDER / "findings").glob("*")} <= known


def test_a_broken_promise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The corpus is worth nothing if targets do not look: a decoder that loses a byte is noticed."""
    from dmsg.mux.core.tlv import decode_tlvs

    target, corpus = importlib.import_module("fuzz.targets.tlv"), importlib.import_module("fuzz.corpus")
    monkeypatch.setattr(target, "decode_tlvs", lambda data: {k: v + b"x" for k, v in decode_tlvs(data).items()})
    with pytest.raises(AssertionError):
        for _, data in corpus.inputs("tlv"):
            target.one_input(data)
