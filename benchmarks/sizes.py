"""The amount of work of each bench: for a figure, for a quick look, or for a test that it still runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class KillsSize:
    """How long relays are killed, and under what load; times in seconds."""

    kills: int
    transports: int
    #: Interval of each transport's blocks of 1 to ``block_bytes`` bytes, in both directions.
    interval_s: float = 0.1
    block_bytes: int = 4_096
    #: From one kill to the next, and from a kill to the restart of the relay.
    kill_every_s: float = 3.0
    restart_s: float = 1.0
    #: Number of relays that each client stays connected to.
    min_servers: int = 2


@dataclass(frozen=True, slots=True)
class SoakSize:
    """How long a network is loaded, with what load, and how often faults happen; times in seconds."""

    seconds: float
    fault_every_s: float
    relays: int = 3
    #: Long end-to-end transports: each sends a block per interval, both ways; one in ten sends large blocks.
    streams: int = 20
    interval_s: float = 0.1
    block_bytes: int = 4_096
    #: Short transports a second between our clients, between 2019 clients, from those to ours; half as many through the
    #: tunnel.
    short_per_s: float = 15.0
    #: Factor for these during the warm-up, to fill the tables that remember a fixed number of recent items.
    warm_up_times: float = 4.0
    lookups_per_s: float = 10.0
    strangers_per_s: float = 10.0
    #: Whether there are clients of the base protocol, and a tunnel of ``dmsg expose`` and ``dmsg forward``.
    base_clients: bool = True
    tunnel: bool = True
    #: How long a receiver or discovery is stopped for.
    stop_s: float = 5.0
    sample_every_s: float = 5.0
    count_every_s: float = 30.0


@dataclass(frozen=True, slots=True)
class FleetSize:
    """How large the simulated fleet is, and how long each phase lasts; times in seconds on its own clock."""

    clients: int
    duration_s: float
    dial_every_s: float
    #: Runs of everything.
    seeds: int = 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Amounts; times in seconds."""

    #: Interleaved repeats; the median is the figure.
    repeats: int
    relay_frames: int
    relay_large_frames: int
    transfer_bytes: int
    pings: int
    dials: int
    connect_per_s: float
    connect_s: float
    idle_connections: int
    stuck_bytes: int
    stuck_s: float
    discovery_entries: int
    discovery_s: float
    kills: KillsSize
    soak: SoakSize
    secure_bytes: int
    fleet: FleetSize
    #: Duration of a long-distance transfer at the rate of its path, and the number of paths.
    wan_s: float
    wan_distances: int
    #: The file that commands send to each other.
    file_bytes: int
    small_files: int
    #: Idle connections, if there are enough descriptors, and how long others are measured beside them.
    crowd: int
    crowd_s: float


FULL: Final = Sizes(
    repeats=5,
    relay_frames=20_000,
    relay_large_frames=3_000,
    transfer_bytes=64 * 1024 * 1024,
    pings=5_000,
    dials=5_000,
    connect_per_s=500.0,
    connect_s=5.0,
    idle_connections=5_000,
    stuck_bytes=1024 * 1024 * 1024,
    stuck_s=5.0,
    discovery_entries=50_000,
    discovery_s=5.0,
    kills=KillsSize(kills=40, transports=50),
    soak=SoakSize(seconds=600.0, fault_every_s=40.0, count_every_s=15.0),
    secure_bytes=128 * 1024 * 1024,
    fleet=FleetSize(clients=50, duration_s=500.0, dial_every_s=20.0, seeds=3),
    wan_s=4.0,
    wan_distances=12,
    file_bytes=256 * 1024 * 1024,
    small_files=2_000,
    crowd=100_000,
    crowd_s=3.0,
)
QUICK: Final = Sizes(
    repeats=3,
    relay_frames=8_000,
    relay_large_frames=1_000,
    transfer_bytes=16 * 1024 * 1024,
    pings=1_500,
    dials=1_500,
    connect_per_s=500.0,
    connect_s=2.0,
    idle_connections=1_000,
    stuck_bytes=128 * 1024 * 1024,
    stuck_s=2.0,
    discovery_entries=5_000,
    discovery_s=2.0,
    kills=KillsSize(kills=8, transports=50),
    soak=SoakSize(seconds=60.0, fault_every_s=15.0, sample_every_s=1.0, count_every_s=2.0),
    secure_bytes=32 * 1024 * 1024,
    fleet=FleetSize(clients=50, duration_s=500.0, dial_every_s=20.0),
    wan_s=2.0,
    wan_distances=12,
    file_bytes=128 * 1024 * 1024,
    small_files=500,
    crowd=5_000,
    crowd_s=2.0,
)
#: ``make soak``: twice as many faults a minute as in ten minutes of ``make bench``.
LONG_SOAK: Final = SoakSize(seconds=7_200.0, fault_every_s=20.0)
TINY: Final = Sizes(
    repeats=1,
    relay_frames=200,
    relay_large_frames=20,
    transfer_bytes=256 * 1024,
    pings=20,
    dials=20,
    connect_per_s=100.0,
    connect_s=0.2,
    idle_connections=20,
    stuck_bytes=8 * 1024 * 1024,
    stuck_s=0.3,
    discovery_entries=50,
    discovery_s=0.2,
    kills=KillsSize(kills=1, transports=4, kill_every_s=1.0, restart_s=0.2),
    soak=SoakSize(
        seconds=2.0,
        fault_every_s=1.2,
        relays=2,
        streams=4,
        base_clients=False,
        tunnel=False,
        stop_s=0.2,
        sample_every_s=0.2,
        count_every_s=0.5,
    ),
    secure_bytes=256 * 1024,
    fleet=FleetSize(clients=20, duration_s=300.0, dial_every_s=20.0),
    wan_s=0.1,
    wan_distances=1,
    file_bytes=1024 * 1024,
    small_files=20,
    crowd=20,
    crowd_s=0.1,
)
