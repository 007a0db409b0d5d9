"""The roles of a bench's processes."""
