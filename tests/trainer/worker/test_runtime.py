"""A worker that is told to end before its master has answered."""

import threading

from emberscale_trainer.membership import MasterClient
from emberscale_trainer.worker.runtime import Worker
from emberscale_trainer.worker.statistics import WorkerStatistics
from identities import identity_of
from own_logs import own_logs


def test_a_worker_that_is_told_to_end_before_it_is_registered_ends_and_says_so() -> None:
    """`emberscale_trainer.worker.__main__` ends it this way; a failure would count against the job's backoffLimit."""
    identity = identity_of("worker", "127.0.0.1:1")
    master = MasterClient(identity)
    threading.Timer(0.3, master.close).start()
    with own_logs() as said:
        Worker(identity, master, WorkerStatistics(), "127.0.0.1:2", threading.Event()).run()
    assert [(entry["event"], entry.get("reason")) for entry in said] == [("stopped", "NotRegistered")]
