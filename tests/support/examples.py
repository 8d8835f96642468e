"""The number of examples for property tests that compute for seconds."""

from hypothesis import settings


def examples(explored: int) -> int:
    """Returns a third of the number in runs that repeat the same examples, and all of it in `make explore`."""
    return explored if settings.get_current_profile_name() == "explore" else explored // 3
