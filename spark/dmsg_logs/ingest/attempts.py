"""Removes the files of attempts at a batch that never reached the commit."""

from __future__ import annotations

import contextlib
import time
from typing import Final

from pyspark.sql import SparkSession

from dmsg_logs.ingest import store
from dmsg_logs.runtime import lease, paths

#: Seconds after which the files of a dead run are removed if their batch is not committed yet.
SWEEP_S: Final = 600.0


def sweep(session: SparkSession, tables: str, commits: list[store.Commit]) -> None:
    """Remove the files of dead runs below ``tables``: at once if another run has committed their batch."""
    committed = {each.batch: each.run for each in commits}
    for name in paths.names(session, paths.join(tables, "events", "attempts")):
        run = name.removesuffix(".json")
        number = run[: store.BATCH_DIGITS]
        if name == run or not number.isdecimal():
            continue
        if int(number) in committed:
            if committed[int(number)] == run:
                paths.delete(session, store.attempt_path(tables, run))
            else:
                remove(session, tables, run)
            continue
        with contextlib.suppress(FileNotFoundError, ValueError):
            owner = lease.Owner.from_json(paths.read_text(session, store.attempt_path(tables, run)))
            now = time.time()
            if not owner.alive(now) and now - owner.at > SWEEP_S:
                remove(session, tables, run)


def remove(session: SparkSession, tables: str, run: str) -> None:
    """Remove all that an attempt at a batch has written under the name ``run``, and the note that it is being made."""
    for path in (store.data_path(tables, run), store.keys_path(tables, run), store.attempt_path(tables, run)):
        paths.delete(session, path)
