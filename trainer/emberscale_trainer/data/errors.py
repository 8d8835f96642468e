"""What can be wrong with data."""


class DataUnavailableError(Exception):
    """Data that cannot be read at all; `reason` is how the job's master names it.

    One malformed record is not this: it is a `BadRecord`, and reading goes on.
    """

    reason = "DataUnavailable"

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem
