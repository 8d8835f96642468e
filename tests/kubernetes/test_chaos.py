"""Something is killed again and again: the job goes on, every sample counts once, and the status stays true."""

import itertools
import random
from collections.abc import Callable

import pytest

from cluster import ENDLESS, Job, Place, assert_exact_so_far, eventually, manifest, setting, submit
from faults import ProcessKiller, delete_pod, redis_loses_its_data, running
from installation import OPERATOR, REDIS
from status_watch import watched_status

ROUNDS = int(setting("EMBERSCALE_CHAOS_ROUNDS", "6"))
SEED = int(setting("EMBERSCALE_CHAOS_SEED", str(random.randrange(10**6))))

pytestmark = [pytest.mark.timeout(300 + 240 * ROUNDS), pytest.mark.alone]


def deeds(killer: ProcessKiller, generator: random.Random) -> dict[str, Callable[[Job], None]]:
    """Returns everything that may be done to the job and the system, by name."""

    def of_job(role: str, harm: Callable[[object], None]) -> Callable[[Job], None]:
        def harm_one(job: Job) -> None:
            harm(generator.choice(job.until(f"a {role} to harm", lambda _: job.running(role), 240)))

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


def goes_on(job: Job) -> None:
    """Waits until the job trains again and has committed more samples."""
    job.until("a phase in which samples are counted", lambda status: status["phase"] == "Training", 240)
    job.wait_for_samples(job.samples() + 1, 240)


def test_whatever_is_killed_the_job_goes_on_and_is_exact(place: Place, killer: ProcessKiller) -> None:
    """Plays EMBERSCALE_CHAOS_ROUNDS rounds."""
    generator = random.Random(SEED)
    known = deeds(killer, generator)
    deck: list[str] = []
    with watched_status(place.namespace) as watch:
        job = submit(manifest("chaos", place, epochs=ENDLESS, replicas=2), place)
        job.wait_for_samples(1)
        for number in range(ROUNDS):
            if not deck:
                deck = sorted(known)
                generator.shuffle(deck)
            name = deck.pop()
            print(f"seed {SEED}, round {number + 1}: {name}, at {job.samples()} samples")  # noqa: T201
            known[name](job)
            goes_on(job)
        assert_exact_so_far(job, place)
    eventually(
        lambda: not [pod for pod in job.pods() if pod["status"]["phase"] == "Running"], "no pod runs on", seconds=60
    )
    print(  # noqa: T201
        f"{ROUNDS} rounds, longest contradiction {watch.longest:.1f} s, "
        f"{watch.without_operator:.0f} s without an operator"
    )
    assert watch.contradictions == {}
    assert watch.duplicates == set()
