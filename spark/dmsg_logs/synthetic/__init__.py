"""A landing zone of a synthetic fleet, with flaws on demand and the exact truth beside it.

The fleet is made to be believable rather than random: days and nights, a slow relay, a failing one, one that is away for
a while, clients that abuse relays and clients that lie about them; and both ends and the relay tell the same story of
every transport. The same seed gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Final

import numpy as np

from dmsg_logs.synthetic.facts import make_facts
from dmsg_logs.synthetic.flaws import Shares, make_budget, make_plan
from dmsg_logs.synthetic.fleet import START, make_fleet
from dmsg_logs.synthetic.lines import Scribe
from dmsg_logs.synthetic.timeline import make_world
from dmsg_logs.synthetic.truth import NAME, Truth, make_truth
from dmsg_logs.synthetic.writer import FileMaker, write_files

__all__ = ["NAME", "START", "Truth", "generate"]

#: Most sessions of a fleet, however few lines are wanted; each takes half a kilobyte of memory.
MAX_SESSIONS: Final = 4_000_000


def generate(
    out: str | PathLike[str],
    *,
    events: int,
    corrupt: float = 0.0,
    duplicates: float = 0.0,
    late: float = 0.0,
    seed: int = 0,
    missing: float = 0.0,
    newer: float = 0.0,
    days: int = 7,
    relays: int | None = None,
    clients: int | None = None,
    start: float = START,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Truth:
    """Fill ``out``, a directory that is empty or does not exist, with exactly ``events`` lines.

    Shares (0 to 0.5) of those lines: ``corrupt`` ones, ``duplicates`` (files shipped again, whole or overlapping), ``late``
    ones (in files that land days after the others, by their modification time), ``newer`` ones with fields this package
    does not know. ``missing`` lines come on top: they stand in the names of a few files that were cut. ``start`` is the
    Unix time of the first day, of which there are ``days``. ``workers`` processes write the files.

    The truth is also written to ``_truth.json``. ``ValueError`` for arguments that make no fleet, or one with more than
    :data:`MAX_SESSIONS`; ``FileExistsError`` if ``out`` is not empty.
    """
    if events < 1:
        raise ValueError("there is at least one line")
    default_relays, default_clients = _size(events)
    relays = default_relays if relays is None else relays
    clients = default_clients if clients is None else clients
    if relays < 2 or clients < 4 or days < 1:
        raise ValueError("a fleet has at least 2 relays, 4 clients and 1 day")
    if relays * clients * (days + 2) > MAX_SESSIONS:  # every client with every relay, anew about once a day
        raise ValueError(
            f"{relays} relays, {clients} clients and {days} days are too many at once: relays x clients x (days + 2) is at "
            f"most {MAX_SESSIONS:,}"
        )
    directory = Path(out)
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty")
    budget = make_budget(events, Shares(corrupt, duplicates, late, missing, newer))
    random = [np.random.default_rng([seed, part]) for part in (0, 1, 2, 3, 4)]
    fleet = make_fleet(random[0], seed, relays=relays, clients=clients, start=start, days=days)
    world, timeline = make_world(fleet, random[1], random[4], budget.written)
    facts = make_facts(world, timeline, random[2])
    updated = np.array([not fleet.nodes[run.node].older for run in fleet.runs])
    plan = make_plan(timeline, budget, updated, random[3])
    maker = FileMaker(directory, world, timeline, plan, Scribe(world, timeline, facts, seed), seed)
    files = write_files(maker, plan, workers, progress)
    truth = make_truth(world, timeline, facts, plan, budget, files, seed=seed, days=days)
    truth.write(directory)
    return truth


def _size(events: int) -> tuple[int, int]:
    """Numbers of relays and clients of a fleet that writes ``events`` lines in a week."""
    for least, relays, clients in ((1_000_000, 10, 100), (100_000, 6, 50), (20_000, 4, 16)):
        if events >= least:
            return relays, clients
    return 3, 8
