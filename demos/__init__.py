"""The programs of ``make demo`` and ``make analytics-demo``."""
