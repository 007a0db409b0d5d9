"""The gateway of one twin: local services and clients talk to it with JSON through Redis."""
