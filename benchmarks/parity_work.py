"""What parity costs a parameter server (PS) in memory accesses alone: without messages, threads and other processes.

One store stands for a PS of a group. It applies the pushes of batches (26 tables, dimension 16, row-wise Adagrad,
power-law ids; the share of the ids that one of `--ps` servers gets), in turns without parity, and with it: it logs
what a push changes, takes the changes by holder, and the holders' blocks of parity apply them. With `Sync` each push is
taken by itself, with `Async` 16 together, each row once. Multiplied by the servers, and over the samples of a batch,
that is the least time that parity adds to a sample; what `parity.py` finds beyond that goes to messages.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from emberscale_trainer.parity import ParityBlocks, ParityLayout
from emberscale_trainer.server.lag import LagBound
from emberscale_trainer.table import TableStore
from ps_operations import BATCH, DIMENSION, distinct_ids, table_specs
from reporting import Ratio, arguments, report, say

BATCHES = 64
WITHOUT, SYNC, ASYNC = "without parity", "Sync", "Async"
GATHERED = {SYNC: 1, ASYNC: LagBound().item_pushes}
"""How many pushes are taken together."""

Push = tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.float32]]


def pushes_of(servers: int, random: np.random.Generator) -> list[Push]:
    """Returns the pushes of BATCHES batches to one of `servers` servers: counts, keys and gradients."""
    made = []
    for _ in range(BATCHES):
        keys = [ids[ids % servers == 0] for ids in distinct_ids(random)]
        rows = sum(map(len, keys))
        gradients = random.standard_normal(rows * DIMENSION, np.float32)
        made.append((np.array([len(table) for table in keys], np.uint32), np.concatenate(keys), gradients))
    return made


@dataclass
class Spent:
    """Seconds, and bytes of changes that were taken."""

    pushing: float = 0.0
    taking: float = 0.0
    applying: float = 0.0
    bytes: int = 0

    @property
    def seconds(self) -> float:
        """All seconds."""
        return self.pushing + self.taking + self.applying


class Server:
    """A store that logs its changes, and the blocks of its holders."""

    def __init__(self, contender: str, pushes: Sequence[Push], layout: ParityLayout) -> None:
        self._store, self._pushes = TableStore(table_specs()), pushes
        self._gathered = GATHERED.get(contender, 0)
        for push in pushes:
            self._store.push(*push)  # all rows are there
        if self._gathered:
            self._log = self._store.log_deltas(
                layout.width, lambda table, segment: layout.lane(0, table, segment), merges=contender == ASYNC
            )
            self._lanes = [layout.lanes_to(0, holder) for holder in layout.holders(0)]
            self._holders = [ParityBlocks(layout, holder, self._store.layouts) for holder in layout.holders(0)]
            while not self._log.is_whole:
                self._log.fill(1 << 24)
                self._pass_on(Spent())

    def run(self) -> Spent:
        """Applies all pushes once."""
        spent = Spent()
        for number, push in enumerate(self._pushes):
            began = time.perf_counter()
            self._store.push(*push)
            spent.pushing += time.perf_counter() - began
            if self._gathered and (number + 1) % self._gathered == 0:
                self._pass_on(spent)
        return spent

    def _pass_on(self, spent: Spent) -> None:
        began = time.perf_counter()
        taken = self._log.take(self._lanes)
        spent.taking += time.perf_counter() - began
        spent.bytes += sum(map(len, taken))
        began = time.perf_counter()
        for holder, deltas in zip(self._holders, taken, strict=True):
            holder.apply(0, deltas)
        spent.applying += time.perf_counter() - began


def draw(path: Path, found: dict[str, list[Spent]]) -> None:
    """Draws the time of a push by its parts."""
    figure = Figure(figsize=(5, 4), layout="constrained")
    axis = figure.subplots()
    bottoms = np.zeros(len(found))
    for part in ("pushing", "taking", "applying"):
        heights = [1e6 / BATCHES * float(np.median([getattr(one, part) for one in spent])) for spent in found.values()]
        axis.bar(list(found), heights, bottom=bottoms, label=part)
        bottoms += np.array(heights)
    axis.set(ylabel="microseconds a push")
    axis.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measures and reports."""
    parser = arguments(__doc__)
    parser.add_argument("--ps", type=int, default=5)
    parser.add_argument("--parity", type=int, choices=[1, 2], default=1)
    options = parser.parse_args()
    pushes, layout = pushes_of(options.ps, np.random.default_rng(0)), ParityLayout(options.ps, options.parity)
    servers = {contender: Server(contender, pushes, layout) for contender in (WITHOUT, SYNC, ASYNC)}
    turns = 3 if options.quick else 15
    found: dict[str, list[Spent]] = {contender: [] for contender in servers}
    for turn in range(turns):
        for contender in list(servers) if turn % 2 == 0 else reversed(servers):
            found[contender].append(servers[contender].run())
    ratios = {}
    for contender in (SYNC, ASYNC):
        pairs = [(ours.seconds, bare.seconds) for ours, bare in zip(found[contender], found[WITHOUT], strict=True)]
        extra = float(np.median([ours - bare for ours, bare in pairs])) / BATCHES
        parts = {part: float(np.median([getattr(one, part) for one in found[contender]])) for part in vars(Spent())}
        say(
            f"{contender}: a push of {np.mean([len(keys) for _, keys, _ in pushes]):,.0f} rows takes "
            f"{1e6 * extra:.0f} us more, with {parts['taking'] / BATCHES * 1e6:.0f} us to take its changes "
            f"({parts['bytes'] / BATCHES / 1e3:.0f} kB) and {parts['applying'] / BATCHES * 1e6:.0f} us to apply them; "
            f"on {options.ps} PS {1e6 * extra * options.ps / BATCH:.2f} us a sample"
        )
        ratios[f"a push with parity ({contender}) / without"] = Ratio(pairs, float("inf"), "max")
    if options.plot:
        draw(options.plot, found)
    report("parity_work", ratios, options.output)


if __name__ == "__main__":
    main()
