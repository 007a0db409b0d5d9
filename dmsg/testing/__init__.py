"""Public test tools: in-memory pipes, whole networks in one process, the transport conformance kit."""
