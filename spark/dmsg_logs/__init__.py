"""Event logs of a dmsg fleet to tables, a report and relay ranks. Needs PySpark; knows nothing of the package dmsg."""

__version__ = "0.1.0"
