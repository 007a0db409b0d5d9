"""Running dmsg: configuration, the event log, metrics."""
