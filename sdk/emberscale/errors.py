"""What a person can get wrong."""


class BadInputError(Exception):
    """Nothing was started because of what was given; the text is one line a problem, and says what is allowed.

    `trace` are the frames of the person's own code, where that is what went wrong.
    """

    def __init__(self, problems: str, trace: str = "") -> None:
        super().__init__(problems)
        self.trace = trace
