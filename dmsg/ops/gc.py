"""Settings of the garbage collector for a process that serves for weeks, made once after it has started."""

from __future__ import annotations

import gc
from typing import Final

#: Objects allocated before a young collection, and young (middle) collections before an older one. With the defaults a busy
#: server walks through everything it holds several times a minute, for 20 ms and more each time at thousands of connections;
#: almost none of our objects need the collector at all.
GC_THRESHOLDS: Final = (50_000, 20, 100)
#: Where HTTP is answered with Klein, each request leaves some 50 objects in cycles, with its body of up to 64 KiB: a young
#: collection after 100 requests instead of 1,000 keeps 6 MiB of bodies waiting at most, and takes a tenth of the time.
HTTP_GC_THRESHOLDS: Final = (5_000, 20, 100)


def settle_memory(thresholds: tuple[int, int, int] = GC_THRESHOLDS) -> None:
    """Exclude what exists now (modules, code, settings) from garbage collection, and make collections rarer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds)
