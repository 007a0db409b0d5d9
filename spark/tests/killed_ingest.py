"""An ingest that is killed: ``killed_ingest.py LANDING TABLES python|jvm``. Run by a test, in a process of its own."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from conftest import _FAST

from dmsg_logs.ingest.batches import ingest
from dmsg_logs.runtime.session import build_session


def main(landing: str, tables: str, victim: str) -> None:
    session = build_session("killed", _FAST)
    jvm: int = session._jvm.java.lang.ProcessHandle.current().pid()  # type: ignore[union-attr]

    def written() -> set[Path]:
        return set(Path(tables).glob("events/data/run=*/*"))

    def kill_while_writing(before: set[Path]) -> None:
        while written() == before:
            pass
        os.kill(jvm, signal.SIGKILL)

    def progress(stage: str, done: int, total: int) -> None:
        if victim == "jvm" and stage == "write":
            threading.Thread(target=kill_while_writing, args=(written(),), daemon=True).start()
        if victim == "python" and stage == "commit":
            os.kill(os.getpid(), signal.SIGKILL)

    ingest(session, landing, tables, progress=progress)


if __name__ == "__main__":
    main(*sys.argv[1:])
