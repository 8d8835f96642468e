"""The schedulers to compare, of one `protocol`: `static`, `elastic` and `optimus`, and any planner (`planned`)."""
