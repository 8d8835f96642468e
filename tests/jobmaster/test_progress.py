"""The job's stages as pure functions: what follows what, and what undoes it."""

import pytest
from tests.jobmaster.driven import Driven
from tests.jobmaster.pure import EVALUATION, TRAINING, WORKER, Pure

from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.status import JobPhase
from emberscale_jobmaster import lifecycle, progress, takeover, tasks
from emberscale_jobmaster.events import FailureReported, SuspensionWanted
from emberscale_jobmaster.figures import committed_samples, phase_of
from emberscale_jobmaster.operations import CheckpointPurpose
from emberscale_jobmaster.state import Stage
from emberscale_jobmaster.statistics import Tally
from emberscale_jobmaster.tasks import Discovered, Indexed, InvalidReportError
from eventually import unwrap


def test_phases_follow_each_other_to_the_end() -> None:
    pure = Pure(evaluation=30, checkpoint={"uri": "/somewhere"})
    pure.start_training(evaluation=30)
    pure.train_epoch()
    while pure.state.stage is Stage.EVALUATE:
        pure.work(Tally(samples=1))
    pure.checkpointed(CheckpointPurpose.FINAL)

    assert pure.phases == [
        JobPhase.PENDING,
        JobPhase.PREPARING,
        JobPhase.RESTORING,
        JobPhase.TRAINING,
        JobPhase.EVALUATING,
        JobPhase.SAVING,
        JobPhase.COMPLETE,
    ]
    assert pure.state.checkpoint == "00000001"
    assert pure.state.plan_version == len(pure.phases) + 1  # one more plan says how many servers have rows


def test_each_epoch_is_evaluated_after_its_last_batch() -> None:
    pure = Pure(training={"epochs": 2}, evaluation=30)
    pure.start_training(evaluation=30)
    for epoch in range(2):
        assert [task.epoch for task in pure.train_epoch()] == [epoch] * 3
        assert pure.state.stage is Stage.EVALUATE
        while pure.state.stage is Stage.EVALUATE:
            pure.work(Tally(samples=5, loss_sum=1.0))
    assert [(result.epoch, result.samples) for result in pure.state.evaluations] == [(1, 5), (2, 5)]


def test_without_evaluation_data_and_without_checkpoints_training_is_all() -> None:
    pure = Pure()
    pure.start_training()
    pure.train_epoch()
    assert pure.phases[-2:] == [JobPhase.TRAINING, JobPhase.COMPLETE]


def test_an_epoch_is_cut_into_shards_that_end_with_the_data() -> None:
    pure = Pure()
    pure.start_training(records=95)
    shards = [(task.start, task.stop, task.shard) for task in pure.train_epoch()]
    assert shards == [(0, 40, 0), (40, 80, 40), (80, 95, 80)]
    assert committed_samples(pure.state, pure.spec) == 95


def test_tokens_ascend_over_the_life_of_the_job_through_a_recovery() -> None:
    pure = Pure()
    pure.start_training()
    tokens = [pure.work().token]
    pure.register(Role.PS, 1, "ps-1-again")
    pure.assign()
    tokens += [task.token for task in pure.train_epoch()]
    assert tokens == sorted(set(tokens))
    assert tokens[0] == 3


def test_a_worker_holds_two_leases_and_no_more() -> None:
    pure = Pure()
    pure.start_training(records=1000)
    assert [pure.acquire() is not None for _ in range(4)] == [True, True, False, False]


def test_a_worker_that_asks_again_while_it_prepares_is_given_the_same() -> None:
    pure = Pure()
    pure.register(Role.WORKER, 0, WORKER.incarnation)
    other = pure.register(Role.WORKER, 1, "other")
    first = unwrap(pure.acquire())
    assert pure.acquire() == first
    assert pure.acquire(other) is None


def test_progress_is_committed_in_batches_and_only_by_the_holder() -> None:
    pure = Pure()
    pure.start_training(records=95)
    pure.work()
    pure.work()
    task = unwrap(pure.acquire())

    for position, committed in ((80, 80), (89, 80), (90, 90), (85, 90), (95, 95)):
        state, dropped = tasks.report_progress(pure.state, pure.spec, WORKER, {task.token: position})
        assert (committed_samples(state, pure.spec), dropped) == (committed, [])
        pure.state = state
    other = MemberId(Role.WORKER, 1, "x")
    _, dropped = tasks.report_progress(pure.state, pure.spec, other, {task.token: 95, 99: 5})
    assert dropped == [task.token, 99]


def test_progress_beyond_the_lease_is_refused() -> None:
    pure = Pure()
    pure.start_training(records=95)
    task = unwrap(pure.acquire())
    with pytest.raises(InvalidReportError, match="ends at position 40"):
        tasks.report_progress(pure.state, pure.spec, WORKER, {task.token: 41})


def test_a_dead_workers_lease_goes_to_the_next_from_its_committed_offset() -> None:
    pure = Pure()
    pure.start_training(records=100)
    task = unwrap(pure.acquire())
    pure.apply(tasks.report_progress(pure.state, pure.spec, WORKER, {task.token: 20})[0])

    pure.apply(lifecycle.on_exit(pure.state, pure.spec, WORKER, 137, "Killed"))
    other = pure.register(Role.WORKER, 1, "other")
    rest = pure.acquire(other)

    assert rest is not None
    assert (rest.start, rest.stop, rest.shard) == (20, 40, 0)
    assert rest.token > task.token


def test_a_lost_server_takes_all_leases_and_everything_back_to_the_checkpoint() -> None:
    pure = Pure(training={"epochs": 2})
    pure.start_training(records=100)
    pure.train_epoch()
    pure.acquire()
    before = pure.state.routing.table

    pure.apply(lifecycle.give_up_silent(pure.state, pure.spec, [MemberId(Role.PS, 0, "ps-0")]))

    assert not pure.state.ledger.leases
    assert not pure.state.routing.ready
    assert pure.state.routing.table.generation == before.generation + 1
    assert pure.state.routing.table.version == before.version + 1
    assert pure.phases[-1] is JobPhase.RESTORING
    assert pure.acquire() is None
    pure.register(Role.PS, 0, "ps-0-again")
    pure.assign(applied={0: ((0, 3), (5, 6))})
    assert (pure.state.epoch, pure.state.stage, pure.state.recoveries) == (0, Stage.TRAIN, 1)
    assert [(task.start, task.stop) for task in pure.train_epoch()] == [(30, 50), (60, 100)]


def test_evaluations_are_those_that_the_checkpoint_had_seen() -> None:
    pure = Pure(training={"epochs": 3}, evaluation=30)
    pure.start_training(evaluation=30)
    for _ in range(2):
        pure.train_epoch()
        while pure.state.stage is Stage.EVALUATE:
            pure.work(Tally(samples=5, loss_sum=1.0))
    first = pure.state.evaluations[0]

    pure.register(Role.PS, 1, "ps-1-again")
    pure.assign(applied={0: ((0, 10),), 1: ((0, 2),)}, evaluations=(first,))

    assert (pure.state.epoch, pure.state.evaluations) == (1, (first,))


def test_a_checkpoint_between_training_and_evaluation_evaluates_again() -> None:
    pure = Pure(evaluation=60)
    pure.start_training(evaluation=60)
    pure.train_epoch()
    pure.work(Tally(samples=5))
    pure.register(Role.PS, 1, "ps-1-again")

    pure.assign(applied={0: ((0, 10),)})

    assert pure.state.stage is Stage.EVALUATE
    assert pure.state.tally == Tally()


def test_a_server_lost_while_data_is_prepared_costs_no_preparation() -> None:
    pure = Pure()
    pure.register(Role.WORKER, 0, WORKER.incarnation)
    for index in range(2):
        pure.register(Role.PS, index, f"ps-{index}")
    pure.work(Discovered((TRAINING,), ()))
    pure.assign()
    task = unwrap(pure.acquire())

    pure.register(Role.PS, 0, "ps-0-again")

    assert task.token in pure.state.ledger.leases
    assert pure.state.recoveries == 0
    pure.apply(tasks.finish(pure.state, pure.spec, WORKER, task.token, Indexed(100)))
    assert pure.state.stage is Stage.READY


def test_changed_data_is_refused_by_the_file() -> None:
    pure = Pure()
    pure.register(Role.WORKER, 0, WORKER.incarnation)
    for index in range(2):
        pure.register(Role.PS, index, f"ps-{index}")
    pure.prepare()

    pure.assign(data=((TRAINING.uri, TRAINING.bytes - 1),))

    assert pure.state.outcome is not None
    assert pure.state.outcome.reason == "DataChanged"
    assert pure.state.outcome.message == (
        "/data/day_0 has 1000 bytes, and had 999; a job cannot continue on changed or added data: "
        "restore the files, or start a new job with checkpoint.initialFrom"
    )


@pytest.mark.parametrize(
    ("saved", "complaint"),
    [
        ((("/data/day_0", 1000), ("/data/day_1", 5)), "/data/day_1 is no longer among the data files"),
        ((), "/data/day_0 was not among the data files"),
    ],
)
def test_files_that_came_or_went_are_refused(saved: tuple[tuple[str, int], ...], complaint: str) -> None:
    pure = Pure()
    pure.register(Role.WORKER, 0, WORKER.incarnation)
    for index in range(2):
        pure.register(Role.PS, index, f"ps-{index}")
    pure.prepare()
    pure.assign(data=saved)
    assert complaint in unwrap(pure.state.outcome).message


def test_while_suspending_only_what_was_begun_is_finished() -> None:
    pure = Pure(checkpoint={"uri": "/somewhere"})
    pure.start_training(records=1000)
    task = unwrap(pure.acquire())
    pure.apply(progress.begin_suspension(pure.state, 0.0))
    assert pure.acquire() is None
    pure.apply(lifecycle.expire_leases(pure.state, [task.token]))
    rest = unwrap(pure.acquire())
    assert (rest.start, rest.stop) == (task.start, task.stop)


def test_a_suspended_job_goes_on_from_its_servers_up() -> None:
    pure = Pure(checkpoint={"uri": "/somewhere"})
    pure.start_training(records=1000)
    pure.apply(progress.begin_suspension(pure.state, 0.0))
    pure.checkpointed(CheckpointPurpose.SUSPENSION)

    pure.apply(takeover.on_takeover(pure.state, pure.spec, wall=1000.0))

    assert pure.phases[-3:] == [JobPhase.TRAINING, JobPhase.SUSPENDED, JobPhase.PENDING]
    pure.register(Role.PS, 0, "new-0")
    pure.apply(progress.begin_assignment(pure.state, pure.spec))
    assert pure.state.routing.table.servers == ()
    pure.register(Role.PS, 1, "new-1")
    pure.assign(applied={0: ((0, 4),)})
    assert pure.phases[-2:] == [JobPhase.RESTORING, JobPhase.TRAINING]


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_run_that_goes_on_trains_the_epochs_that_it_has_got_since_its_job_was_complete(epochs: int) -> None:
    """A run that is killed while it writes its model does not know yet that its job is Complete."""
    driven = Driven()
    driven.start()
    driven.storage.behaviour = "hangs"
    driven.train_all()
    assert phase_of(driven.job, driven.spec) is JobPhase.SAVING
    driven.suspend()
    driven.storage.behaviour = "works"
    driven.pass_time(60)
    assert phase_of(driven.job, driven.spec) is JobPhase.COMPLETE
    training = driven.spec.training.model_copy(update={"epochs": epochs})
    driven.spec = driven.spec.model_copy(update={"training": training})

    driven.master_dies()
    assert phase_of(driven.job, driven.spec) is JobPhase.COMPLETE
    driven.all_die()

    if epochs > 1:
        assert phase_of(driven.job, driven.spec) is JobPhase.PENDING
        for index in range(driven.servers):
            driven.join(Role.PS, index)
        driven.join(Role.WORKER, 0)
        driven.pass_time(2)
        assert (driven.job.stage, driven.job.epoch) == (Stage.TRAIN, 1)
        driven.train_all()
        driven.pass_time(2)
    assert phase_of(driven.job, driven.spec) is JobPhase.COMPLETE
    assert committed_samples(driven.job, driven.spec) == epochs * driven.records


def test_a_run_that_goes_on_tries_a_job_again_that_had_failed() -> None:
    """A run that is killed before it has noted the failure of its job cannot give it another uid."""
    driven = Driven(interval=5)
    driven.start()
    driven.train_for(8, every=1)
    driven.tell(FailureReported(now=driven.now, member=driven.workers[0], reason="Bad", message="no", fatal=True))
    driven.master_dies()
    assert phase_of(driven.job, driven.spec) is JobPhase.FAILED

    driven.all_die()

    assert (phase_of(driven.job, driven.spec), driven.job.clock.active_seconds) == (JobPhase.PENDING, 0.0)
    driven.start()
    driven.pass_time(2)
    assert (driven.job.stage, driven.job.checkpoint) == (Stage.TRAIN, "00000001")
    assert driven.job.ledger.done_count > 0
    driven.train_all()
    assert phase_of(driven.job, driven.spec) is JobPhase.COMPLETE
    assert committed_samples(driven.job, driven.spec) == driven.records


def test_an_epoch_without_data_fails_the_job() -> None:
    pure = Pure()
    pure.register(Role.WORKER, 0, WORKER.incarnation)
    pure.prepare(records=0)
    assert pure.state.outcome is not None
    assert (pure.state.outcome.phase, pure.state.outcome.reason) == (JobPhase.FAILED, "DataEmpty")


def test_paths_that_match_no_file_fail_the_job() -> None:
    pure = Pure()
    pure.register(Role.WORKER, 0, WORKER.incarnation)
    pure.work(Discovered((), ()))
    assert unwrap(pure.state.outcome).reason == "DataUnavailable"


def test_a_result_of_another_kind_is_refused() -> None:
    pure = Pure()
    pure.register(Role.WORKER, 0, WORKER.incarnation)
    task = unwrap(pure.acquire())
    with pytest.raises(InvalidReportError, match="is not one of stage Discover"):
        tasks.finish(pure.state, pure.spec, WORKER, task.token, Indexed(4))


def test_a_file_and_a_task_have_no_more_records_than_is_possible() -> None:
    pure = Pure(evaluation=30)
    pure.register(Role.WORKER, 0, WORKER.incarnation)
    pure.work(Discovered((TRAINING,), (EVALUATION,)))
    task = unwrap(pure.acquire())
    with pytest.raises(InvalidReportError, match="a file has no 1099511627777 records"):
        tasks.finish(pure.state, pure.spec, WORKER, task.token, Indexed((1 << 40) + 1))
    pure.apply(tasks.finish(pure.state, pure.spec, WORKER, task.token, Indexed(100)))
    pure.work(Indexed(30))
    for index in range(pure.spec.ps.initial_replicas):
        pure.register(Role.PS, index, f"ps-{index}")
    pure.assign()
    pure.train_epoch()
    task = unwrap(pure.acquire(batches=2))
    with pytest.raises(InvalidReportError, match="has fewer than 21 samples"):
        tasks.finish(pure.state, pure.spec, WORKER, task.token, Tally(samples=21))


def test_results_of_a_lease_that_is_gone_change_nothing() -> None:
    pure = Pure()
    pure.start_training()
    task = unwrap(pure.acquire())
    pure.apply(lifecycle.expire_leases(pure.state, [task.token]))
    assert tasks.finish(pure.state, pure.spec, WORKER, task.token, None) == pure.state


def test_the_first_failure_stands() -> None:
    pure = Pure()
    pure.apply(progress.fail(pure.state, "NonFiniteLoss", "worker-0"))
    pure.apply(progress.fail(pure.state, "BadRecords", "later"))
    assert unwrap(pure.state.outcome).reason == "NonFiniteLoss"


def test_a_suspended_job_has_trained_what_its_checkpoint_holds() -> None:
    """Workers never report their last batches, but the checkpoint has them."""
    driven = Driven()
    driven.start()
    driven.train(5)
    for server in driven.ps.values():
        server.applied[0].update((5, 6))
    driven.tell(SuspensionWanted(now=driven.now))
    assert phase_of(driven.job, driven.spec) is JobPhase.SUSPENDED
    assert committed_samples(driven.job, driven.spec) == 7 * driven.spec.training.batch_size


def test_figures_of_training_that_a_roll_back_undoes_are_not_shown() -> None:
    driven = Driven(interval=20, target_pls=1.0)
    driven.start()
    driven.train(10)
    driven.pass_time(22)
    driven.kill(Role.PS, 1)
    assert driven.state.seen.window.slices  # the other server keeps what it has learned
    driven.kill(Role.PS, 0)
    assert driven.job.recoveries == 1
    assert not driven.state.seen.window.slices
