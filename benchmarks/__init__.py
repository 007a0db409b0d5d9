"""The benches behind the figures in the README: ``python -m benchmarks [names] [--json FILE] [--quick]``.

Every bench is a module with ``run(size)``. Servers and clients are processes of their own (:mod:`benchmarks.roles`),
all traffic stays on loopback, and all started processes are ended. Costs are CPU times of a process, which a busy machine
disturbs far less than wall time.
"""
