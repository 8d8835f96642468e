"""How much memory the parameter servers will need, and when they would run out of it."""
