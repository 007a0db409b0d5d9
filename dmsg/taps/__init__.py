"""One module for each role that ``twistd`` can run: its options and its service."""
