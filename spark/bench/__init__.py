"""``python -m bench``: the log pipeline beside DuckDB and Polars doing the same work on the same landing zone."""
