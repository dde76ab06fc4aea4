"""Scripts that write tables of the documentation."""
