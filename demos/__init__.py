"""What ``make demo`` and ``make analytics-demo`` run."""
