"""``python -m dmsg_logs.first_use``: a first use of Spark in a process of its own, whose JVM ends before it does.

:mod:`dmsg_logs.runtime.class_archive` runs it: with ``work`` so that the JVM loads, and archives, the classes that the
pipeline uses; with ``start`` to see how fast another one starts with that archive.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from dmsg_logs.ingest.batches import ingest
from dmsg_logs.runtime.session import build_session
from dmsg_logs.synthetic import generate


def main(what: str, options: str, directory: str) -> None:
    """Start Spark, and let it do a bit of everything if it is to ``work``; print the seconds to its first answer."""
    began = time.monotonic()
    settings = {"spark.master": "local[2]", "spark.driver.defaultJavaOptions": options}
    session = build_session("dmsg-logs prepare", settings)
    session.range(1).count()
    took_s = time.monotonic() - began
    if what == "work":
        landing = os.path.join(directory, "landing")
        generate(landing, events=1_000, corrupt=0.01, duplicates=0.02, days=1, workers=1)
        ingest(session, landing, os.path.join(directory, "tables"))
    context: Any = session.sparkContext
    session.stop()
    context._gateway.proc.stdin.close()  # tells the JVM to end, and so to write its archive
    context._gateway.proc.wait()
    print(took_s)


if __name__ == "__main__":
    main(*sys.argv[1:])
