"""Tables and pictures of runs, comparisons and plans."""
