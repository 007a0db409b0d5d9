"""Discovery: signed entries, the stores that hold them, the HTTP interface and its client."""
