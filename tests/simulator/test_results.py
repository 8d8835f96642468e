from emberscale_simulator.results import JobOutcome, SeedOutcome
from simulated_jct import paired_jcts


def outcome(scheduler: str, **jcts: float | None) -> SeedOutcome:
    jobs = tuple(
        JobOutcome(
            job=job,
            arrival=0.0,
            waited=0.0,
            jct=jct,
            scalings=0,
            restarts=0,
            first_shape=None,
            final_shape=None,
            timeline=(),
        )
        for job, jct in jcts.items()
    )
    return SeedOutcome(scheduler, 0, jobs, 0.5, 0.5, 0.5, 1.0)


def test_schedulers_are_compared_over_the_jobs_that_completed_under_both() -> None:
    ours = outcome("ours", a=10.0, b=None, c=30.0, d=40.0)
    other = outcome("other", d=400.0, c=None, b=200.0, a=100.0)
    assert paired_jcts(ours, other) == ([10.0, 40.0], [100.0, 400.0])
    assert ours.completion_rate == other.completion_rate == 0.75


def test_nothing_is_compared_where_no_job_completed_under_both() -> None:
    assert paired_jcts(outcome("ours", a=1.0, b=None), outcome("other", a=None, b=2.0)) == ([], [])
