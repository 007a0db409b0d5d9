"""The stores that hold a discovery's entries, and the rules all of them follow."""
