"""Which checkpoint the next one builds on, and when a checkpoint has all rows again."""

import pytest
from tests.jobmaster.driven import Driven
from tests.jobmaster.driven_master import Fault
from tests.jobmaster.storage_double import StorageDouble

from emberscale_api.checkpoint import CheckpointFile
from emberscale_api.job import IncrementalMode, Quantization
from emberscale_api.job.roles import Role
from emberscale_jobmaster.chains import COSTS_KEPT, LONGEST, MOST_BASES, Chain, begins_anew, builds_on
from emberscale_jobmaster.observations import Observations
from emberscale_jobmaster.state import Stage
from emberscale_jobmaster.status import job_status

INTERVAL = 10.0


def sizes(mode: IncrementalMode, growth: list[int], checkpoints: int) -> list[int]:
    """Returns the sizes of checkpoints of 100 bytes; `growth`: the bytes changed 1, 2, ... intervals after a base."""
    chain, written, taken = Chain(), [], [0]
    for number in range(1, checkpoints + 1):
        since = builds_on(chain, mode)
        size = 100 if not since else growth[number - int(since) - 1]
        files = [CheckpointFile(path="ps-0/rows", bytes=size, crc32=1)]
        if since:
            files.append(CheckpointFile(path="ps-0/rows", bytes=100, crc32=1, checkpoint=since))
        chain = chain.followed_by(f"{number:08d}", files)
        written.append(size)
        taken.append(number)
    return written


GROWTH = [26, 31, 36, 40, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61]


def test_the_sizes_of_each_mode_are_those_of_the_paper() -> None:
    assert sizes(IncrementalMode.FULL, GROWTH, 4) == [100] * 4
    assert sizes(IncrementalMode.ONE_SHOT, GROWTH, 5) == [100, 26, 31, 36, 40]
    assert sizes(IncrementalMode.CONSECUTIVE, GROWTH, 5) == [100, 26, 26, 26, 26]
    intermittent = sizes(IncrementalMode.INTERMITTENT, GROWTH, 14)
    again = intermittent.index(100, 1)
    assert intermittent[:again] == [100, *GROWTH[: again - 1]]
    assert intermittent[again + 1] == 26
    assert sizes(IncrementalMode.AUTO, GROWTH, 14) == intermittent


@pytest.mark.parametrize(
    ("increments", "anew"),
    [((), False), ((25,), False), ((99,), False), ((100,), True), ((25, 40), False), ((26, 90), True)],
)
def test_all_rows_come_again_once_increments_are_expected_to_cost_as_much(
    increments: tuple[int, ...], anew: bool
) -> None:
    assert begins_anew(Chain("1", "3", 100, increments)) is anew
    past = 100 + sum(increments)
    assert anew is (bool(increments) and past <= (len(increments) + 1) * increments[-1])


def test_a_consecutive_chain_ends_when_a_restore_reads_too_much() -> None:
    written = sizes(IncrementalMode.CONSECUTIVE, GROWTH, 40)
    assert [number for number, size in enumerate(written) if size == 100] == [0, 13, 26, 39]
    assert sum(written[:13]) >= MOST_BASES * 100 > sum(written[:12])
    assert sizes(IncrementalMode.CONSECUTIVE, [100], 9) == [100] * 9
    assert builds_on(Chain("", "", 0), IncrementalMode.CONSECUTIVE) == ""


def test_a_consecutive_chain_of_small_increments_ends_somewhere() -> None:
    chain = Chain("1", "7", 100, (1,) * LONGEST)
    assert builds_on(chain, IncrementalMode.CONSECUTIVE) == ""
    assert builds_on(Chain("1", "7", 100, (1,) * (LONGEST - 1)), IncrementalMode.CONSECUTIVE) == "7"


@pytest.mark.parametrize(
    ("held", "wanted", "since"), [(0, 0, "7"), (0, 2, "7"), (2, 2, "7"), (8, 2, "7"), (2, 8, ""), (8, 0, "")]
)
def test_rows_with_fewer_bits_than_are_wanted_are_built_on_by_none(held: int, wanted: int, since: str) -> None:
    chain = Chain("1", "7", 100, (1,), weight_bits=held)
    assert builds_on(chain, IncrementalMode.CONSECUTIVE, wanted) == since


def test_a_chain_has_the_fewest_bits_of_its_files() -> None:
    base = CheckpointFile(path="ps-0/table-0-0.b4", bytes=100, crc32=1)
    chain = Chain().followed_by("1", [base, CheckpointFile(path="ps-0/dense-0.rows", bytes=10, crc32=1)])
    assert chain.weight_bits == 4
    earlier = base.model_copy(update={"checkpoint": "1"})
    finer = CheckpointFile(path="ps-0/table-0-0.b8", bytes=9, crc32=1)
    assert chain.followed_by("2", [earlier, finer]).weight_bits == 4
    assert chain.followed_by("3", [CheckpointFile(path="ps-0/table-0-0.rows", bytes=100, crc32=1)]).weight_bits == 0


def driven(mode: str, changed_bytes: int = 2) -> Driven:
    driven = Driven(
        interval=INTERVAL, incremental=mode, storage=StorageDouble(changed_bytes=changed_bytes), records=2000
    )
    driven.start()
    return driven


def bases(driven: Driven) -> list[tuple[int, int]]:
    """Returns the number of each checkpoint that was begun, and of the one on which it was to build; 0: none."""
    return [(int(one), int(since or 0)) for one, since in sorted(driven.storage.built_on.items())]


def test_each_mode_builds_on_its_own_checkpoint() -> None:
    for mode, expected in (
        ("Full", [(1, 0), (2, 0), (3, 0), (4, 0)]),
        ("OneShot", [(1, 0), (2, 1), (3, 1), (4, 1)]),
        ("Consecutive", [(1, 0), (2, 1), (3, 2), (4, 3)]),
        ("Intermittent", [(1, 0), (2, 1), (3, 1), (4, 1)]),
    ):
        job = driven(mode)
        job.train(3)
        job.train_for(4.2 * INTERVAL)
        assert bases(job)[:4] == expected, mode


def test_intermittent_writes_all_rows_again_when_most_of_them_change() -> None:
    job = driven("Auto", changed_bytes=9)
    job.train_for(12.5 * INTERVAL)
    assert len([since for _, since in bases(job) if not since]) == 1
    job.storage.changed_bytes = 10
    job.train_for(2.5 * INTERVAL)
    assert len([since for _, since in bases(job) if not since]) == 2


def test_a_checkpoint_that_failed_is_built_on_by_none() -> None:
    job = driven("Consecutive")
    job.train_for(1.2 * INTERVAL)
    job.faults["Saved", 1] = Fault(code="ABORTED")
    job.train_for(2.0 * INTERVAL)
    assert bases(job)[:3] == [(1, 0), (2, 1), (3, 1)]


def test_after_a_roll_back_the_next_checkpoint_has_all_rows() -> None:
    job = driven("OneShot")
    job.train(2)
    job.pass_time(1.2 * INTERVAL)
    job.kill(Role.PS, 0)
    job.join(Role.PS, 0)
    job.join(Role.WORKER, 0)
    job.train_for(2.0 * INTERVAL)
    assert [since for one, since in bases(job) if one > 1][:2] == [
        0,
        max(one for one, since in bases(job) if not since),
    ]


def test_a_new_master_continues_the_chain() -> None:
    job = driven("OneShot")
    job.train_for(1.2 * INTERVAL)
    job.master_dies()
    job.train_for(2.0 * INTERVAL)
    assert [since for _, since in bases(job)][:2] == [0, 1]


def test_the_last_checkpoint_of_a_job_has_all_rows() -> None:
    job = driven("OneShot")
    job.pass_time(1.2 * INTERVAL)
    job.train_all()
    assert job.job.stage is Stage.SAVE
    job.pass_time(1)
    assert bases(job)[-1][1] == 0


def test_weights_of_more_bits_begin_a_new_chain() -> None:
    job = Driven(interval=INTERVAL, incremental="OneShot", quantization="2")
    job.start()
    job.train_for(2.2 * INTERVAL)
    checkpoint = job.spec.checkpoint.model_copy(update={"quantization": Quantization.BITS_8})
    job.spec = job.spec.model_copy(update={"checkpoint": checkpoint})
    job.train_for(2 * INTERVAL)
    assert bases(job)[:4] == [(1, 0), (2, 1), (3, 0), (4, 3)]


def test_a_manifest_that_cannot_be_written_ends_the_chain() -> None:
    job = driven("OneShot")
    job.pass_time(1.2 * INTERVAL)
    job.train(1)
    job.storage.behaviour = "fails"
    job.pass_time(1000)
    assert job.job.chain == Chain()
    job.storage.behaviour = "works"
    job.pass_time(2 * INTERVAL + 60)
    assert bases(job)[-1][0] > 2
    assert any(one > 2 and not since for one, since in bases(job))


def test_the_status_says_what_each_checkpoint_cost() -> None:
    job = driven("OneShot", changed_bytes=3)
    job.train_for(2.2 * INTERVAL)
    status = job_status(job.job, Observations(), job.spec, job.now)
    told = [(cost.checkpoint, cost.written_bytes, cost.bytes) for cost in status.checkpoints]
    assert told == [("00000001", 20, 20), ("00000002", 6, 26)]
    assert [cost.held_seconds for cost in status.checkpoints] == [0.01, 0.01]
    job.train_for(60 * INTERVAL)
    assert len(job.job.checkpoint_costs) == COSTS_KEPT
