"""Sets of ranks with their process groups, collectives, and lanes on which they run."""
