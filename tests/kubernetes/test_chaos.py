"""Something is killed, again and again: jobs end Complete, every sample counts once, and the status tells the truth."""

import itertools
import random
from collections.abc import Callable

import pytest

from cluster import RECORDS, Job, NotInTimeError, Place, assert_exact, eventually, manifest, setting, submit
from faults import ProcessKiller, delete_pod, redis_loses_its_data, running
from installation import OPERATOR, REDIS
from status_watch import watched_status

ROUNDS = int(setting("EMBERSCALE_CHAOS_ROUNDS", "6"))
SEED = int(setting("EMBERSCALE_CHAOS_SEED", str(random.randrange(10**6))))
EPOCHS = 10

pytestmark = [pytest.mark.timeout(300 + 240 * ROUNDS), pytest.mark.alone]


def deeds(killer: ProcessKiller, generator: random.Random) -> dict[str, Callable[[Job], None]]:
    """Everything that is done, by name."""

    def of_job(role: str, harm: Callable[[object], None]) -> Callable[[Job], None]:
        def harm_one(job: Job) -> None:
            def there_or_over() -> bool | None:
                return bool(job.running(role)) or job.phase() == "Complete" or None

            eventually(f"a {role} to harm", there_or_over, 240)
            if pods := job.running(role):
                harm(generator.choice(pods))

        return harm_one

    def of_system(selector: str, harm: Callable[[object], None]) -> Callable[[Job], None]:
        return lambda job: harm(running(selector))

    def redis_and_master(job: Job) -> None:
        redis_loses_its_data(killer)
        of_job("master", killer.kill)(job)

    harms: dict[str, Callable[[object], None]] = {"killed": killer.kill, "deleted": delete_pod}
    members = {
        f"{role} {how}": of_job(role, harm)
        for (how, harm), role in itertools.product(harms.items(), ("master", "ps", "worker"))
    }
    system = {
        f"{name} {how}": of_system(selector, harm)
        for (how, harm), (name, selector) in itertools.product(
            harms.items(), (("operator", OPERATOR), ("Redis", REDIS))
        )
    }
    data = {"Redis loses its data": lambda job: redis_loses_its_data(killer)}
    return {**members, **system, **data, "Redis loses its data and the master dies": redis_and_master}


def goes_on(job: Job) -> bool:
    """Whether the job has trained on something since, or has ended."""
    try:
        eventually("a phase in which samples are counted", lambda: job.phase() in ("Training", "Complete") or None, 240)
        before = job.samples()
        eventually("more samples", lambda: job.samples() > before or job.phase() == "Complete" or None, 240, every=0.5)
    except NotInTimeError as error:
        raise AssertionError(f"{error}\n{job.status()}\n{job.logs()}") from error
    return job.phase() != "Complete"


def test_whatever_is_killed_jobs_end_complete_and_exact(place: Place, killer: ProcessKiller) -> None:
    """EMBERSCALE_CHAOS_ROUNDS rounds; a job that ends before they are over is followed by another."""
    generator = random.Random(SEED)
    known = deeds(killer, generator)
    deck: list[str] = []
    jobs: list[Job] = []
    with watched_status(place.namespace) as watch:
        for number in range(ROUNDS):
            if not jobs or jobs[-1].phase() == "Complete":
                jobs.append(submit(manifest(f"chaos-{len(jobs)}", place, epochs=EPOCHS), place))
                jobs[-1].wait_for_samples(1)
            if not deck:
                deck = sorted(known)
                generator.shuffle(deck)
            name = deck.pop()
            print(f"seed {SEED}, round {number + 1}: {name}, at {jobs[-1].samples()} samples")  # noqa: T201
            known[name](jobs[-1])
            goes_on(jobs[-1])
        for job in jobs:
            assert job.wait_complete()["progress"]["samples"] == EPOCHS * RECORDS
    for job in jobs:
        assert_exact(job, place, EPOCHS * RECORDS)
        eventually(
            f"no pod of {job.name} runs on",
            lambda job=job: not [pod for pod in job.pods() if pod["status"]["phase"] == "Running"],  # type: ignore[misc]
            seconds=60,
        )
    print(  # noqa: T201
        f"{ROUNDS} rounds, {len(jobs)} jobs, longest contradiction {watch.longest:.1f} s, "
        f"{watch.without_operator:.0f} s without an operator"
    )
    assert watch.contradictions == {}
    assert watch.duplicates == set()
