"""The stages of the pipeline as programs of their own for ``spark-submit``."""
