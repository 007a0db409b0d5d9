"""What the figures in the README come from: ``python -m benchmarks [names] [--json FILE] [--quick]``.

Every bench is a module with ``run(size)``. Servers and clients are processes of their own (:mod:`benchmarks.roles`),
all traffic stays on loopback, and everything that is started is ended again. Costs are CPU times of a process, which
a busy machine disturbs far less than wall time.
"""
