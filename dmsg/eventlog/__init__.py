"""The structured event log: its schema, and the writer of its files."""
