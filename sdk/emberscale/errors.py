"""What a person can get wrong."""


class BadInputError(Exception):
    """Nothing was started because of what was given; the text is one line a problem, and says what is allowed."""
