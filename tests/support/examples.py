"""How many examples the property tests that compute for seconds try."""

from hypothesis import settings


def examples(explored: int) -> int:
    """A third of them in a run that repeats the examples of the one before; all of them in `make explore`."""
    return explored if settings.get_current_profile_name() == "explore" else explored // 3
