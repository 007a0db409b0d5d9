"""The relays that a client tries, their order and number at a time, for any information and measurements."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dmsg.address import HostPort
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.relays.candidates import Candidate, alternate, spread
from dmsg.relays.race import Race, RaceConfig
from dmsg.relays.scores import CLOSE, NEUTRAL, POOR, RelayScores, ScoreConfig
from fuzz.choices import Choices

_KEYS = [SecretKey(bytes((number,)) * 32).public_key for number in range(1, 41)]
_NEAR = 1e-6


def one_input(data: bytes) -> None:
    """The first byte chooses: scores, the order of candidates, or a race."""
    choices = Choices(data)
    (_scores, _order, _race)[choices.byte() % 3](choices)


# --- scores ----------------------------------------------------------------------------------------------------------


@dataclass
class _Measured:
    """Measurements, each with its weight, quality and time."""

    weight: float = 0.0
    value: float = 0.0
    at_s: float = 0.0

    def left(self, now_s: float, half_life_s: float) -> tuple[float, float]:
        """Their total weight now, and the same multiplied by their quality."""
        left = 2.0 ** (-(now_s - self.at_s) / half_life_s)
        return self.weight * left, self.value * left

    def add(self, weight: float, quality: float, now_s: float, config: ScoreConfig) -> None:
        """Add one; the total weight is limited."""
        old_weight, old_value = self.left(now_s, config.half_life_s)
        self.weight, self.value, self.at_s = old_weight + weight, old_value + weight * quality, now_s
        if self.weight > config.observations:
            self.value *= config.observations / self.weight
            self.weight = config.observations


class _Scores:
    """Scores of a few relays, and their expected values."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        what = choices.byte()
        self.config = ScoreConfig(
            measure=what & 3 != 3, relays=4 if what & 4 else 64, observations=8.0, half_life_s=64.0
        )
        self.scores = RelayScores(self.config)
        self.now_s = 1_000.0
        self.relays = _KEYS[:6]
        self.all = _Measured()
        self.measured: dict[PublicKey, _Measured] = {}
        self.places: dict[PublicKey, float] = {}
        self.listed_at_s = 0.0
        self.ranks: dict[PublicKey, float] = {}
        self.fresh = 0.0

    def run(self) -> None:
        """Measurements, lists, documents and time; and the orders that follow."""
        choices = self.choices
        for _ in range(100):
            if not choices.left:
                break
            what, relay = choices.byte() % 8, choices.pick(self.relays)
            match what:
                case 0 | 1 | 2 | 3:
                    self.measure(what, relay, choices.byte() * 16.0 - 64)
                case 4:
                    listed = [key for key in self.relays if choices.flag()]
                    self.scores.listed(listed, self.now_s)
                    ends = max(1, len(listed) - 1)
                    self.places = {key: 150 - 300 * at / ends for at, key in enumerate(listed) if len(listed) > 1}
                    self.places = dict(list(self.places.items())[: self.config.relays])
                    self.listed_at_s = self.now_s
                case 5:
                    self.ranks = {key: choices.byte() * 8.0 - 512 for key in self.relays}
                    self.fresh = choices.byte() / 255
                    self.scores.ranks = self.ranks.__getitem__ if choices.flag() else None
                    self.scores.freshness = lambda: self.fresh
                case 6:
                    self.now_s += choices.byte()
                case _:
                    self.check_orders()
            self.check(relay)

    def measure(self, what: int, relay: PublicKey, elapsed_ms: float) -> None:
        """A connection, an answer or a failure. A failure never improves a score, and the best measurement never lowers it."""
        scores, config, now_s = self.scores, self.config, self.now_s
        before = scores.score(relay, now_s)
        neutral_ms = config.accept_neutral_ms if what & 1 else config.connect_neutral_ms
        weight = 0.5 if what & 1 else 1.0
        quality = neutral_ms / (neutral_ms + max(0.0, elapsed_ms))
        if what < 2:
            (scores.connected, scores.answered)[what](relay, elapsed_ms, now_s)
        else:
            (scores.failed, scores.refused)[what - 2](relay, now_s)
            weight, quality = weight * config.failure_weight, 0.0
        after = scores.score(relay, now_s)
        assert what < 2 or after <= before + _NEAR
        assert what >= 2 or elapsed_ms > 0 or after >= before - _NEAR
        if not config.measure:
            assert after == before
            return
        self.all.add(weight, quality, now_s, config)
        measured = self.measured.pop(relay, _Measured())
        measured.add(weight, quality, now_s, config)
        if len(self.measured) >= config.relays:
            del self.measured[next(iter(self.measured))]
        self.measured[relay] = measured

    def check(self, relay: PublicKey) -> None:
        """A score is the mean of reported and measured values, and memory is bounded."""
        scores, config, now_s = self.scores, self.config, self.now_s
        assert len(scores._measured) <= config.relays and len(scores._places) <= config.relays
        weight, value = self.all.left(now_s, config.half_life_s)
        believed = max(NEUTRAL, (NEUTRAL + 1000 * value) / (1 + weight))
        believed += self.places.get(relay, 0.0) * 2.0 ** (-(now_s - self.listed_at_s) / config.half_life_s)
        believed, worth = min(max(believed, 0.0), 1000.0), config.place_weight
        if scores.ranks is not None:
            told = min(max(self.ranks[relay], 0.0), 1000.0)
            believed += (told - believed) * self.fresh
            worth += (config.rank_weight - worth) * self.fresh
        weight, value = self.measured.get(relay, _Measured()).left(now_s, config.half_life_s)
        score = scores.score(relay, now_s)
        assert math.isclose(score, (believed * worth + 1000 * value) / (worth + weight), abs_tol=_NEAR)
        assert -_NEAR <= score <= 1000 + _NEAR

    def check_orders(self) -> None:
        """No relay is left out; connected relays come first unless they are poor, and clearly better ones before others."""
        choices, scores, now_s = self.choices, self.scores, self.now_s
        uniform = random.Random(choices.byte()).random
        drawn = scores.draw(self.relays, uniform, now_s)
        connected = {key for key in self.relays if choices.flag()}
        order = scores.best_first(self.relays, connected, uniform, now_s)
        assert sorted(drawn) == sorted(order) == sorted(self.relays)
        rated = [(scores.score(key, now_s), key) for key in order]
        groups = [2 if score < POOR else int(key not in connected) for score, key in rated]
        assert groups == sorted(groups)
        for at, (better, _) in enumerate(rated):
            for (worse, _), group in zip(rated[:at], groups, strict=False):
                assert group != groups[at] or better - worse <= CLOSE + _NEAR


def _scores(choices: Choices) -> None:
    _Scores(choices).run()


# --- the order of candidates -----------------------------------------------------------------------------------------


def _order(choices: Choices) -> None:
    """A stranger's many relays in one network come no earlier than a single one elsewhere; remembered relays take turns."""
    candidates = []
    groups: dict[PublicKey, object] = {}
    for number in range(choices.below(40)):
        key = _KEYS[number if choices.flag() else choices.below(len(_KEYS))]
        where = choices.byte()
        network, at = where >> 1 & 7, where >> 4
        host = (f"9.9.{network}.{at}", f"2600:{network}::{at:x}", f"{at}.example")[where % 3]
        address = HostPort(host, 80) if where < 240 else None
        candidates.append(Candidate(key, address, remembered=bool(where & 1)))
        groups[key] = (where % 3, network if where % 3 < 2 else None) if address is not None else key
    uniform = random.Random(choices.byte())
    draws: list[list[PublicKey]] = []

    def draw(keys: Iterable[PublicKey]) -> list[PublicKey]:
        drawn = list(keys)
        uniform.shuffle(drawn)
        draws.append(drawn)
        return drawn

    def best(keys: Iterable[PublicKey]) -> PublicKey:
        return max(keys, key=lambda key: key.raw)

    order = spread(candidates, draw, best)
    known = {one.public_key: one for one in candidates}
    assert len(order) == len(known) and all(known[one.public_key] is one for one in order)
    before: Counter[object] = Counter()
    rounds = []
    for one in order:
        group = groups[one.public_key]
        rounds.append(before[group])
        before[group] += 1
    assert rounds == sorted(rounds)
    assert [groups[one.public_key] for one in order] == [groups[key] for drawn in draws[1:] for key in drawn]
    for group in set(groups.values()):
        drawn = [key for key in draws[0] if groups[key] == group]
        assert [one.public_key for one in order if groups[one.public_key] == group] == drawn
        assert {key for keys in draws[1:] for key in keys if groups[key] == group} == {best(drawn)}
    for number in range(max(rounds, default=-1) + 1):
        assert rounds.count(number) == sum(size > number for size in before.values())

    remembered, others = ([one for one in order if one.remembered is kind] for kind in (True, False))
    mixed = alternate(remembered, others)
    assert [one for one in mixed if one.remembered] == remembered
    assert [one for one in mixed if not one.remembered] == others and len(mixed) == len(order)
    for at in range(len(mixed)):
        old = sum(one.remembered for one in mixed[:at])
        new = at - old
        assert mixed[at].remembered is (new == len(others) or (old < len(remembered) and old < 2 * (new + 1)))


# --- the race --------------------------------------------------------------------------------------------------------


def _race(choices: Choices) -> None:
    """Attempts start when there is room, are overtaken, end or are given up; a list of running attempts is the model."""
    how = choices.byte()
    config = RaceConfig(attempts=6) if how & 1 else RaceConfig()
    race = Race(config)
    running: list[tuple[PublicKey, str, float]] = []
    now_s = 0.0
    for _ in range(200):
        if not choices.left:
            break
        what, number = choices.byte(), choices.byte()
        key, group = _KEYS[number % len(_KEYS)], "abcdefgh"[number // 32]
        fresh = [one for one in running if now_s < one[2] + config.hedge_s]
        match what % 4:
            case 0 | 1 if key not in race:
                of_a_group, hurried = 1 + (what >> 2) % 4, bool(what & 16)
                wide = hurried and len(running) - len(fresh) >= config.width
                width = max(config.hurried_width if wide else config.width, of_a_group)
                room = len(fresh) < width and sum(one[1] == group for one in fresh) < of_a_group
                assert race.room(group, now_s, of_a_group=of_a_group, hurried=hurried) is room
                oldest = race.surplus()
                assert oldest == (running[0][0] if len(running) >= config.attempts else None)
                if room:
                    if oldest is not None:
                        assert config.attempts < 32 or now_s >= running[0][2] + 4  # as RaceConfig says
                        race.end(oldest)
                        del running[0]
                    race.start(key, group, now_s)
                    running.append((key, group, now_s))
            case 2:
                race.end(key)
                running = [one for one in running if one[0] != key]
            case 3 if what & 4:
                groups = {"abcdefgh"[at] for at in range(8) if number >> at & 1}
                assert race.unwanted(groups) == [one[0] for one in running if one[1] in groups]
            case _:
                now_s += (what >> 2) / 16
        assert len(race) == len(running) <= config.attempts and race.all() == [one[0] for one in running]
        assert all(one[0] in race for one in running)
        due_s = [one[2] + config.hedge_s for one in running if one[2] + config.hedge_s > now_s]
        assert race.next_s(now_s) == min(due_s, default=None)
        assert sum(race.overtaken(one[0], now_s) for one in running) == len(running) - len(due_s)


def seeds() -> Iterator[bytes]:
    """Measurements of every kind with lists and documents; candidates of many and of few networks; races that stall."""
    measures = b"".join(
        bytes((what, relay, elapsed)) for what in range(4) for relay, elapsed in ((0, 0), (1, 60), (2, 4))
    )
    listed, ranked = b"\x04\x00\x01\x01\x01\x00\x01\x01", b"\x05\x00\xff\x00\x50\x80\x30\x90"
    orders = b"\x07\x00\x05\x01\x00\x01\x00\x01\x00"
    for how in (b"\x00", b"\x04", b"\x03"):
        head = b"\x00" + how
        yield head + measures + orders
        yield head + listed + orders + b"\x06\x00\x40" + measures + listed + orders
        yield (
            head
            + ranked
            + b"\xff\x01"
            + measures
            + orders
            + ranked
            + b"\x80\x01"
            + listed
            + orders
            + ranked
            + b"\x00\x00"
        )
        yield head + b"".join(bytes((2, relay, 0)) * 4 for relay in range(3)) + orders + b"\x06\x00\xff" + orders
        yield head + bytes((0, 3, 0)) * 12 + orders + b"".join(bytes((0, relay, 4)) for relay in range(6)) + orders
    for wheres in (range(0, 240, 6), range(3, 80, 2), [0] * 30, range(220, 256), [0, 6, 12, 252] * 8, []):
        yield b"\x01" + bytes((len(wheres),)) + b"".join(bytes((1, where)) for where in wheres) + b"\x07"
    yield b"\x01\x14" + b"".join(bytes((number & 1, number, number * 7)) for number in range(20))
    for how in (b"\x02\x00", b"\x02\x01"):
        start = [bytes((16, number * 7 % 256)) for number in range(250)]
        yield how + b"".join(start[at] + (b"\x43\x00" if at % 3 == 2 else b"") for at in range(90))
        yield how + b"".join(start[at] + b"\x1b\x00" for at in range(60)) + b"".join(bytes((2, at)) for at in range(20))
        yield (
            how
            + b"".join(start[:12])
            + b"\x07\xff\x07\x05"
            + b"\x43\x00"
            + b"".join(start[12:30])
            + b"\x0c\x01\x0c\x02"
        )
        yield how + b"".join(bytes((12, number)) for number in range(8)) + b"\x43\x00" + b"\x0c\x09"
