import math
from typing import Any

import pytest

from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.running import AdmissionCounts, Traffic
from emberscale_api.routing import PsAddress
from emberscale_jobmaster.ledger import Ledger
from emberscale_jobmaster.membership import Membership, Process
from emberscale_jobmaster.observations import SILENT_STUCK_SECONDS, Observations
from emberscale_jobmaster.reports import ServerReport, Vitals, WorkReport
from emberscale_jobmaster.statistics import ProgressiveWindow, RateMeter, eta_seconds

WORKER = MemberId(Role.WORKER, 0, "w")
SERVER = MemberId(Role.PS, 0, "p")


def report(samples: int = 100, stages: dict[str, float] | None = None) -> WorkReport:
    return WorkReport(samples, loss_sum=0.5 * samples, positives=(0, 1), negatives=(1, 0), stage_seconds=stages or {})


def served(rows: int, repeated: int = 0, admission: AdmissionCounts | None = None) -> ServerReport:
    return ServerReport({"C1": rows}, 8, 1, repeated, {"pull": 1.0}, {"C1": admission} if admission else {})


def members() -> Membership:
    return Membership().register(Role.WORKER, 0, Process("w", "", "", ""))


def leased() -> Ledger:
    granted = Ledger.fresh(10).grant(WORKER, 1, 4)
    assert granted is not None
    return granted[0]


def later(seen: Observations, seconds: float, can_move: bool = True) -> Observations:
    """Returns the observations after this time, with the master watching throughout."""
    for _ in range(round(10 * seconds)):
        seen = seen.counted(0.1, can_move)
    return seen


def test_a_member_is_silent_only_after_the_whole_timeout() -> None:
    seen = Observations().heard(WORKER)
    assert later(seen, 9.9).silent(members(), timeout=10.0) == []
    assert later(seen, 10.2).silent(members(), timeout=10.0) == [WORKER]
    assert later(later(seen, 9.0).heard(WORKER), 9.0).silent(members(), timeout=10.0) == []


def test_after_a_restart_of_the_master_every_deadline_starts_anew() -> None:
    seen = Observations().watching(members(), leased())
    assert later(seen, 9).silent(members(), timeout=10.0) == []
    assert later(seen, 9).lapsed(leased(), timeout=10.0, forgotten=2.0) == []
    assert later(seen, 11).silent(members(), timeout=10.0) == [WORKER]
    assert later(seen, 11).lapsed(leased(), timeout=10.0, forgotten=2.0) == [1]


def test_a_lease_lives_while_its_holder_mentions_it() -> None:
    seen = Observations().heard(WORKER).watching(members(), leased())
    for _ in range(40):
        seen = later(seen, 1).heard(WORKER).beat(WORKER, Vitals(), {1: 0})
        assert seen.lapsed(leased(), timeout=10.0, forgotten=2.0) == []


def test_a_holder_that_speaks_of_other_things_loses_the_lease_sooner() -> None:
    seen = Observations().heard(WORKER).watching(members(), leased())
    seen = later(seen, 1.5).heard(WORKER).beat(WORKER, Vitals(), {})
    assert seen.lapsed(leased(), timeout=10.0, forgotten=2.0) == []
    seen = later(seen, 1.0).heard(WORKER).beat(WORKER, Vitals(), {})
    assert seen.lapsed(leased(), timeout=10.0, forgotten=2.0) == [1]


def test_nobody_is_blamed_for_a_pause_of_the_master() -> None:
    seen = Observations().heard(WORKER).watching(members(), leased())
    seen = seen.counted(3600.0, can_move=True)
    assert seen.silent(members(), timeout=10.0) == []
    assert seen.lapsed(leased(), timeout=10.0, forgotten=2.0) == []
    assert later(seen, 11).silent(members(), timeout=10.0) == [WORKER]


def working(seen: Observations, seconds: int, batch_seconds: int, can_move: bool = True) -> Observations:
    """A worker sends heartbeats, and commits a batch of ten samples every `batch_seconds`."""
    for second in range(1, seconds + 1):
        before = max(seen.positions.values(), default=0)
        position = before + 10 * (second % batch_seconds == 0)
        seen = later(seen, 1, can_move).heard(WORKER).beat(WORKER, Vitals(), {1: position})
        seen = seen.worked(WORKER, int(seen.watched), report(samples=position - before), now=seen.watched)
    return seen


def stuck(seen: Observations) -> list[MemberId]:
    return seen.stuck(members(), leased())


def test_a_worker_that_speaks_and_does_not_move_is_stuck() -> None:
    moving = working(Observations().heard(WORKER).watching(members(), leased()), 100, batch_seconds=1)
    assert stuck(moving) == []
    assert stuck(working(moving, 55, batch_seconds=1000)) == []
    assert stuck(working(moving, 65, batch_seconds=1000)) == [WORKER]


def test_a_worker_may_take_long_over_its_first_batch() -> None:
    seen = Observations().heard(WORKER).watching(members(), leased())
    assert stuck(working(seen, 170, batch_seconds=1000)) == []
    assert stuck(working(seen, 190, batch_seconds=1000)) == [WORKER]


def test_long_batches_are_no_sign_of_a_stuck_worker() -> None:
    seen = working(Observations().heard(WORKER).watching(members(), leased()), 210, batch_seconds=70)
    assert stuck(working(seen, 340, batch_seconds=1000)) == []
    assert stuck(working(seen, 360, batch_seconds=1000)) == [WORKER]


def test_a_worker_that_evaluates_tells_nothing_before_its_shard_is_done() -> None:
    moving = working(Observations().heard(WORKER).watching(members(), leased()), 100, batch_seconds=1)
    evaluating = working(moving, 500, batch_seconds=1000)
    assert evaluating.stuck(members(), leased(), SILENT_STUCK_SECONDS) == []
    evaluating = working(evaluating, 110, batch_seconds=1000)
    assert evaluating.stuck(members(), leased(), SILENT_STUCK_SECONDS) == [WORKER]


def test_time_in_which_training_cannot_move_is_not_held_against_a_worker() -> None:
    moving = working(Observations().heard(WORKER).watching(members(), leased()), 100, batch_seconds=1)
    held = working(moving, 300, batch_seconds=1000, can_move=False)
    assert stuck(held) == []
    assert stuck(working(held, 65, batch_seconds=1000)) == [WORKER]


def test_a_report_that_is_repeated_counts_once() -> None:
    seen = Observations().heard(WORKER)
    for sequence in (1, 2, 2, 1):
        seen = seen.worked(WORKER, sequence, report(stages={"pull": 1.5 * sequence}), now=float(sequence))
    assert seen.sightings["worker-0"].stage_seconds == {"pull": 3.0}
    assert sum(part.samples for part in seen.window.slices) == 200


def test_a_new_incarnation_reports_from_one_and_keeps_the_slots_totals() -> None:
    seen = Observations().heard(WORKER).beat(WORKER, Vitals(5, 50, 1.0), {})
    seen = seen.worked(WORKER, 9, report(stages={"pull": 1.0}), now=1.0)
    after = MemberId(Role.WORKER, 0, "again")
    seen = seen.heard(after).worked(after, 1, report(stages={"pull": 2.0}), now=3.0)
    assert seen.sightings["worker-0"].stage_seconds == {"pull": 3.0}
    assert seen.sightings["worker-0"].vitals.peak_memory_bytes == 50


def test_traffic_is_summed_over_workers_and_their_incarnations() -> None:
    other, again = MemberId(Role.WORKER, 1, "v"), MemberId(Role.WORKER, 0, "again")
    seen = Observations()
    for member, sequence, told in [
        (WORKER, 1, Traffic(10, 1, 2, 6, 9)),
        (WORKER, 2, Traffic(20, 2, 4, 12, 18)),
        (other, 1, Traffic(100, 0, 0, 0, 0)),
        (again, 1, Traffic(7, 1, 8, 2, 5)),
    ]:
        work = WorkReport(1, 0.5, (0, 1), (1, 0), {}, traffic=told)
        seen = seen.heard(member).worked(member, sequence, work, now=1.0)
    assert seen.traffic() == Traffic(127, 3, 12, 14, 23)


def test_rows_are_summed_over_servers_and_repeats_over_their_incarnations() -> None:
    other, again = MemberId(Role.PS, 1, "q"), MemberId(Role.PS, 0, "p2")
    seen = Observations().heard(SERVER).served(SERVER, served(10, repeated=3))
    seen = seen.heard(other).served(other, served(20, repeated=1))
    seen = seen.heard(again).served(again, served(7, repeated=2))
    owners = [PsAddress(index, "", "", "") for index in (0, 1)]
    assert seen.rows(owners) == {"C1": 27}
    assert seen.rows(owners[:1]) == {"C1": 7}
    assert seen.repeated_batches() == 6


def test_admission_is_counted_over_servers_and_their_incarnations() -> None:
    other, again = MemberId(Role.PS, 1, "q"), MemberId(Role.PS, 0, "p2")
    seen = Observations().heard(SERVER).served(SERVER, served(10, admission=AdmissionCounts(10, 40, 3)))
    seen = seen.heard(other).served(other, served(20, admission=AdmissionCounts(5, 7, 0)))
    seen = seen.served(other, served(20, admission=AdmissionCounts(6, 9, 1)))
    assert seen.admission() == {"C1": AdmissionCounts(16, 49, 4)}
    seen = seen.heard(again)
    assert seen.admission() == {"C1": AdmissionCounts(16, 49, 4)}
    seen = seen.served(again, served(7, admission=AdmissionCounts(1, 1, 1)))
    assert seen.admission() == {"C1": AdmissionCounts(17, 50, 5)}


def test_speed_is_what_was_done_lately() -> None:
    meter = RateMeter(window=10.0)
    assert meter.rate(0.0) is None
    for second in range(31):
        meter = meter.add(100 if second <= 15 else 300, now=float(second))
    assert meter.rate(30.0) == pytest.approx(300.0)
    assert meter.rate(35.0) == pytest.approx(150.0, rel=0.1)


def test_a_burst_at_the_start_is_not_taken_for_speed() -> None:
    meter = RateMeter().add(1_000_000, now=5.0)
    assert meter.rate(5.1) is None


def test_loss_and_auc_are_of_the_last_window_only() -> None:
    window = ProgressiveWindow(window=10.0)
    assert math.isnan(window.loss())
    assert math.isnan(window.auc())
    window = window.add(10, 50.0, [10, 0], [0, 10], now=0.0)
    assert (window.loss(), window.auc()) == (5.0, 0.0)
    for second in range(20):
        window = window.add(10, 2.0, [0, 5], [5, 0], now=float(second))
    assert window.loss() == pytest.approx(0.2)
    assert window.auc() == 1.0
    assert len(window.slices) <= 11


def test_histograms_of_another_length_begin_anew() -> None:
    window = ProgressiveWindow().add(10, 5.0, [10, 0], [0, 10], now=0.0).add(4, 1.0, [0, 0, 2], [2, 0, 0], now=0.1)
    assert (window.loss(), window.auc()) == (0.25, 1.0)


@pytest.mark.parametrize(
    ("remaining", "speed", "eta"), [(100, 10.0, 10.0), (0, None, 0.0), (5, None, -1.0), (5, 0.0, -1.0)]
)
def test_eta_is_negative_while_it_is_not_known(remaining: int, speed: Any, eta: float) -> None:
    assert eta_seconds(remaining, speed) == eta


def test_a_fast_job_is_judged_by_its_last_samples() -> None:
    window = ProgressiveWindow(enough=1000)
    for second, loss in enumerate([9.0, 8.0, 7.0, 2.0, 1.0]):
        window = window.add(600, 600 * loss, [0, 5], [5, 0], now=float(second))
    assert window.loss() == pytest.approx(1.5)


def test_a_new_master_learns_what_stages_took_before_it_came() -> None:
    seen = Observations().heard(WORKER)
    seen = seen.worked(WORKER, 41, report(stages={"pull": 100.0}), now=1.0)
    assert seen.sightings["worker-0"].stage_seconds == {"pull": 100.0}
