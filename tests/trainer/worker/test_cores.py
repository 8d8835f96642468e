"""How many threads a worker computes with, and how a plan changes the number while it runs."""

import threading

import pytest
import torch

from emberscale_trainer.worker.compute import ComputeThreads, threads_of


@pytest.mark.parametrize(("cores", "threads"), [(None, 1), (0.5, 1), (1.0, 1), (1.5, 1), (3.0, 3)])
def test_a_fraction_of_a_core_gets_no_thread_of_its_own(cores: float | None, threads: int) -> None:
    assert threads_of(cores) == threads


def test_the_thread_that_computes_takes_on_what_another_asks_for() -> None:
    before = torch.get_num_threads()
    threads = ComputeThreads()
    seen: list[int] = []

    def compute() -> None:
        threads.want(3.5)
        threads.adopt()
        seen.append(torch.get_num_threads())
        threads.want(0.0)
        threads.adopt()
        seen.append(torch.get_num_threads())

    computing = threading.Thread(target=compute)
    computing.start()
    computing.join()
    assert seen == [3, 3]
    torch.set_num_threads(before)
