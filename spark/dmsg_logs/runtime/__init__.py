"""The base of every stage: the Spark session, files on any file system, one run at a time, progress for people."""
