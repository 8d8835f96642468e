"""The number of compute threads: as many as the cores in the plan in force."""

import torch


def threads_of(cpu_cores: float | None) -> int:
    """Returns the number of threads for these cores; one for a fraction of a core, or if no number is given."""
    return max(1, int(cpu_cores or 1))


class ComputeThreads:
    """Set from any thread, adopted by the one that computes: PyTorch keeps the number thread by thread."""

    def __init__(self) -> None:
        self._wanted = torch.get_num_threads()

    def want(self, cpu_cores: float) -> None:
        """The cores of this process have changed; 0 for no limit, which changes nothing."""
        if cpu_cores > 0:
            self._wanted = threads_of(cpu_cores)

    def adopt(self) -> None:
        """Applies what is wanted to the calling thread."""
        if torch.get_num_threads() != self._wanted:
            torch.set_num_threads(self._wanted)
