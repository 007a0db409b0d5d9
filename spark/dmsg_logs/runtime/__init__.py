"""What every stage runs on: the Spark session, files on any file system, one run at a time, progress for people."""
