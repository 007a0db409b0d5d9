"""The work in DuckDB. Lines are read as text, parsed once, kept in a table, and the copies found by key alone.

Tried and slower: ``read_json`` with columns (it also cannot tell what a bad line looked like), and ``row_number()`` over
whole rows (2.5 times the work).
"""

from __future__ import annotations

import json
import sys
from typing import Final

import duckdb

from bench.shape import (
    ACCOUNTS,
    EARLIEST_S,
    FIELDS,
    GOOD,
    HOURLY,
    LATEST_S,
    NAMES,
    PATTERN,
    QUARANTINE,
    TRANSPORTS,
    TYPED,
    VERSIONS,
    Task,
    summary,
)
from bench.stages import stage
from dmsg_logs.schemas import ALL_COLUMNS

_TYPES: Final = {"str": "VARCHAR", "int": "BIGINT", "float": "DOUBLE", "bool": "BOOLEAN"}
_PARQUET: Final = "format parquet, compression zstd"


def _cases(by_event: dict[str, str], otherwise: str) -> str:
    arms = " ".join(f"when '{name}' then ({text})" for name, text in by_event.items())
    return f"case d.event {arms} else {otherwise} end"


def _parse(zone: str) -> str:
    """One row a line: file, the parsed object ``d``, ``raw`` and ``fault``."""
    lines = (
        f"read_csv('{zone}/{PATTERN}', columns={{'line': 'VARCHAR'}}, delim='\\x1f', quote='', escape='', header=false, "
        "auto_detect=false, compression='zstd', filename='file', strict_mode=false, ignore_errors=true, "
        "store_rejects=true, max_line_size=2097152)"
    )
    shape = json.dumps({column.name: _TYPES[column.type] for column in ALL_COLUMNS})
    # a field of the event without a value makes a line suspicious; only such a line is looked at once more
    suspicious = _cases(
        {event: " or ".join(f'd."{name}" is null' for name in names) for event, names in FIELDS.items()}, "true"
    )
    wrong = " or ".join(
        f"(d.\"{column.name}\" is null and coalesce(json_type(line, '$.{column.name}'), 'NULL') <> 'NULL')"
        for column in TYPED
    )
    later = _cases({event: f"coalesce(d.v, 0) > {version}" for event, version in VERSIONS.items()}, "true")
    return f"""
        select file, d, case when fault is not null or {later} then line end as raw, fault
        from (
            select file, line, d, case
                when d is null then case
                    when trim(line, ' \t\r') = '' then 'blank'
                    when ltrim(line, ' \t\r')[1] <> '{{' then 'not_an_object'
                    else 'torn' end
                when (d.v is null or d.seq is null or d.ts is null or {suspicious}) and ({wrong}) then 'wrong_type'
                when coalesce(d.node, '') = '' or coalesce(d.boot, '') = '' or d.seq is null then 'no_key'
                when coalesce(d.event, '') = '' then 'no_event'
                when coalesce(d.ts, 0) < {EARLIEST_S} or d.ts >= {LATEST_S} then 'bad_time' end as fault
            from (
                select file, coalesce(line, '') as line,
                    case when json_valid(line) and ltrim(line, ' \t\r')[1] = '{{'
                         then json_transform(line, '{shape}') end as d
                from {lines}
            )
        )
    """


def clean(connection: duckdb.DuckDBPyConnection, task: Task) -> dict[str, int]:
    """Stage ``clean``."""
    flat = ", ".join(f'd."{name}" as "{name}"' for name in NAMES)
    connection.execute(f"create table lines as select {flat}, raw, file, fault from ({_parse(str(task.zone))})")
    # lines that are not UTF-8 are no lines to the reader, but it keeps them
    connection.execute(
        "create table rejects as select file_path as file, csv_line as line from reject_errors join reject_scans "
        "using (scan_id, file_id)"
    )
    connection.execute(
        "create table copies as select unnest(list_sort(list(row))[2:]) as row from "
        "(select rowid as row, node, boot, seq from lines where fault is null) group by node, boot, seq having count(*) > 1"
    )
    connection.execute(
        f"copy (select * exclude (fault), cast(make_timestamp(cast(ts * 1e6 as bigint)) as date) as date from lines "
        f"where fault is null and rowid not in (select row from copies)) "
        f"to '{task.part(GOOD)}' ({_PARQUET}, partition_by (date))"
    )
    connection.execute(
        f"copy (select file, raw as line, fault as reason from lines where fault is not null "
        f"union all select file, line, 'not_utf8' from rejects) to '{task.part(QUARANTINE)}.parquet' ({_PARQUET})"
    )
    connection.execute("create table files (file varchar)")
    connection.execute("insert into files select unnest(?)", [task.files()])
    connection.execute(
        f"""
        copy (
            with told as (
                select file, 1 as lines, cast(fault is null and copies.row is null as int) as good,
                    cast(copies.row is not null as int) as dup, cast(fault is not null as int) as corrupt
                from lines left join copies on lines.rowid = copies.row
                union all select file, 1, 0, 0, 1 from rejects
            ), counted as (
                select file, coalesce(sum(lines), 0) as lines, coalesce(sum(good), 0) as good,
                    coalesce(sum(dup), 0) as dup, coalesce(sum(corrupt), 0) as corrupt
                from files left join told using (file) group by file
            )
            select *, recorded - lines as missing from (
                select *, cast(regexp_extract(file, '-([0-9]+)-[0-9a-f]{{16}}[.]jsonl[.]zst$', 1) as bigint) as recorded
                from counted
            )
        ) to '{task.part(ACCOUNTS)}.parquet' ({_PARQUET})
        """
    )
    counts = connection.execute(
        f"select count(*), sum(lines), sum(good), sum(dup), sum(corrupt), sum(missing) "
        f"from '{task.part(ACCOUNTS)}.parquet'"
    ).fetchone()
    assert counts is not None
    return summary(*map(int, counts))


def tables(connection: duckdb.DuckDBPyConnection, task: Task) -> dict[str, int]:
    """Stage ``tables``."""
    connection.execute(
        f"create view events as select * from read_parquet('{task.part(GOOD)}/**/*.parquet', hive_partitioning=true)"
    )
    connection.execute(
        f"""
        copy (
            select node, boot, conn, transport_id, initiator, responder, server,
                case when close_ts is not null or not opening then 'closed' else 'open' end as state,
                case when opening then ts end as opened_at,
                case when opening then close_ts else ts end as closed_at,
                accept_ms, case when opening then close_code else code end as code,
                case when opening then close_bytes else coalesce(bytes_in, 0) + coalesce(bytes_out, 0) end as bytes,
                case when opening then close_duration else duration_s end as duration_s
            from (
                select *, event = 'transport_opened' as opening,
                    coalesce(lag(event) over pair = 'transport_opened', false) as follows,
                    case when lead(event) over pair = 'transport_closed' then lead(ts) over pair end as close_ts,
                    case when lead(event) over pair = 'transport_closed' then lead(code) over pair end as close_code,
                    case when lead(event) over pair = 'transport_closed' then lead(bytes_in + bytes_out) over pair end
                        as close_bytes,
                    case when lead(event) over pair = 'transport_closed' then lead(duration_s) over pair end
                        as close_duration
                from events where role = 'server' and event in ('transport_opened', 'transport_closed')
                window pair as (partition by node, boot, conn, transport_id order by seq)
            ) where opening or not follows
        ) to '{task.part(TRANSPORTS)}.parquet' ({_PARQUET})
        """
    )
    connection.execute(
        f"""
        copy (
            select node, cast(floor(ts / 3600) as bigint) as hour,
                count(*) filter (event = 'connection_opened') as connections_opened,
                count(*) filter (event = 'connection_closed') as connections_closed,
                count(*) filter (event = 'handshake_failed') as handshakes_failed,
                count(*) filter (event = 'transport_opened') as transports_opened,
                count(*) filter (event = 'transport_closed' and code <> 0) as transports_failed,
                coalesce(sum("count") filter (event = 'refused'), 0) as refusals,
                coalesce(sum(bytes_in + bytes_out) filter (event = 'transport_closed'), 0) as bytes,
                quantile_cont(accept_ms, [0.5, 0.95, 0.99]) filter (event = 'transport_opened') as accept_ms,
                quantile_cont(queue_peak_bytes, [0.5, 0.95, 0.99]) filter (event = 'transport_closed') as queue_bytes
            from events where role = 'server' group by all
        ) to '{task.part(HOURLY)}.parquet' ({_PARQUET})
        """
    )
    rows = [
        connection.execute(f"select count(*) from '{task.part(name)}.parquet'").fetchone()
        for name in (TRANSPORTS, HOURLY)
    ]
    return {name: int(row[0]) for name, row in zip((TRANSPORTS, HOURLY), rows, strict=True) if row is not None}


def main(arguments: list[str]) -> None:
    """One process: all stages."""
    task = Task.from_arguments(arguments)
    with stage("start"):
        task.out.mkdir(parents=True)
        connection = duckdb.connect(str(task.out / "work.duckdb"))
        connection.execute(f"set threads = {task.cores}")
        connection.execute("set preserve_insertion_order = false")
    with stage("clean") as results:
        results.update(clean(connection, task))
    with stage("tables") as results:
        results.update(tables(connection, task))
    connection.close()


if __name__ == "__main__":
    main(sys.argv[1:])
