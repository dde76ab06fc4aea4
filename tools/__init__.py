"""Scripts that check the code, its tests and its pages, and write tables of the pages."""
