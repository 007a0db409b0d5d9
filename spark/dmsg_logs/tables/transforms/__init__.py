"""Pure functions from DataFrames to DataFrames, one module a table."""
