"""The shipper's plan: when each file is tried."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.sansio.backoff import Backoff
from dmsg.shipping.plan import FILE_REASONS, Plan, Waiting
from fuzz.choices import Choices

_REASONS = (*sorted(FILE_REASONS), "unreachable", "refused")


def one_input(data: bytes) -> None:
    """Operations: lists of files, attempts that succeed or fail for any reason, files that vanish, time.

    A file has one attempt at a time, and none once it is settled; the number of attempts in progress is limited; every file
    is tried in the end: without further failures all files are shipped, whatever happened before.
    """
    choices = Choices(data)
    parallel = 1 + choices.below(4)
    give_up_after = choices.below(5) or None
    plan = Plan(
        parallel=parallel, backoff=Backoff(1.0, 8.0), uniform=lambda: choices.byte() / 256, give_up_after=give_up_after
    )
    now = 0.0
    there: dict[str, Waiting] = {}
    running: dict[str, Waiting] = {}
    number = 0
    for _ in range(300):
        if not choices.left:
            break
        match choices.below(8):
            case 0:
                for _ in range(choices.below(5)):
                    number += 1
                    there[f"f{number}"] = Waiting(f"f{number}", choices.byte(), float(choices.byte()))
            case 1:
                plan.scan_begins()
                plan.scanned(there.values())
            case 2 if there:
                there.pop(list(there)[choices.byte() % len(there)])  # another shipper has shipped it
            case 3 | 4:
                file = plan.take(now)
                if file is not None:
                    assert file.path not in running and len(running) < parallel
                    assert plan.attempt(file.path) >= 1
                    running[file.path] = file
            case 5 if running:
                path = list(running)[choices.byte() % len(running)]
                del running[path]
                there.pop(path, None)
                plan.settled(path, reached=choices.flag())
            case 6 if running:
                path = list(running)[choices.byte() % len(running)]
                del running[path]
                assert plan.failed(path, choices.pick(_REASONS), now) >= now
            case _:
                now += choices.byte() / 4
        assert plan.in_flight == len(running)
        due = plan.next_due(now)
        assert due is None or due >= now
        assert not plan.finished or not running
        assert set(running) <= {one.path for one in plan.backlog}
    for path in list(running):
        there.pop(path, None)
        plan.settled(path, reached=True)
    plan.scan_begins()
    plan.scanned(there.values())
    while (due := plan.next_due(now)) is not None:
        now = max(now, due)
        file = plan.take(now)
        assert file is not None, "something was due and could not be taken"
        assert file.path in there
        del there[file.path]
        plan.settled(file.path, reached=True)
    assert plan.finished
    assert give_up_after is not None or not there


def seeds() -> Iterator[bytes]:
    """Files shipped at once, one at a time, after failures of their own and of the target, given up."""
    scan, take, done, fail = b"\x00\x04" + bytes(range(8)) + b"\x01", b"\x03", b"\x05\x00\x01", b"\x06\x00"
    for begin in (b"\x00\x00", b"\x03\x00", b"\x01\x02", b"\x03\x03"):
        yield begin + scan + (take + done) * 4
        yield begin + scan + take * 4 + (fail + b"\x04") * 4 + b"\x07\xff" + take * 2 + done
        yield begin + scan + (take + fail + b"\x00") * 4 + b"\x07\xff" * 4 + take + done
        yield begin + scan + take + b"\x02\x00\x01" + fail + b"\x05" + scan + take * 3 + done * 3
