"""Takes one server's rows out of the parity of its group, in the two ways of the server's `withdrawing`."""

from collections.abc import Sequence

import numpy as np
from tests.simulation.group import Sent, SimulatedGroup
from tests.simulation.parity_sets import PLACES, SLOT_BITS, TABLE
from tests.simulation.units import Batch, Unit
from tests.simulation.world import Task

from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.server.barrier import NotHeldError

_AHEAD = 2
"""Pieces that are sent before the holders have acknowledged earlier ones."""
_TAKEN_ROWS = 2
"""Lost rows that are decoded at a time."""


class SimulatedWithdrawing:
    """One server's part in the withdrawal of all rows but lost ones. It survives failed rebuilds of the same group."""

    def __init__(self, group: SimulatedGroup) -> None:
        self.group = group
        self._is_working = False
        self._agreed: dict[int, AppliedBatches] | None = None
        self._withdraws_all = False
        self._marks: dict[int, int] = {}
        self.keys: dict[Unit, int] = {}
        """The lost rows that this server decodes and that follow on demand, with the numbers of their places."""

    def decode(self, lost: frozenset[int]) -> Task[dict[int, AppliedBatches]]:
        """Reduces the parity to the rows of lost members; returns the batches in these rows.

        Of lost members of which this server holds no parity, it returns none. Raises NotHeldError.
        """
        group = self.group
        self._marks = group.lose(lost)
        yield from self._begin_work()
        try:
            if group.core.has_told:
                raise NotHeldError("rows are withdrawn on demand here")
            if self._agreed is None:
                self._withdraws_all = True
                if not group.core.has_withdrawn:
                    while not group.is_empty:
                        yield from self.withdraw_next()
                    yield from self.end()
                agreed = yield from self._await_agreed()
                if len(lost) > 1:
                    yield from self._exchange_halves()
                self._agreed = agreed
            return self._agreed
        finally:
            self._end_work()

    def find_keys(self, lost: int) -> Task[dict[int, AppliedBatches]]:
        """Learns the keys of a lost member's rows; returns as `decode` does. Raises NotHeldError."""
        group = self.group
        self._marks = group.lose(frozenset((lost,)))
        yield from self._begin_work()
        try:
            if self._withdraws_all:
                raise NotHeldError("all rows are withdrawn here")
            if self._agreed is None:
                yield from self._tell_columns(lost)
                agreed = yield from self._await_agreed()
                stripes = []
                for stripe, units in group.parity.lost_keys(lost, group.withdrawals.columns):
                    self.keys |= {unit: stripe << SLOT_BITS | place for place, unit in units.items()}
                    stripes.append((TABLE, stripe))
                group.withdrawals.begin(stripes)
                group.core.holding.resume()
                self._agreed = agreed
            return self._agreed
        finally:
            self._end_work()

    def _begin_work(self) -> Task[None]:
        while self._is_working:
            yield self.group.changed
        self._is_working = True

    def _end_work(self) -> None:
        self._is_working = False
        self.group.changed.notify()

    def _await_agreed(self) -> Task[dict[int, AppliedBatches]]:
        while (agreed := self.group.core.agreed()) is None:
            yield self.group.changed
        return agreed

    def _exchange_halves(self) -> Task[None]:
        group = self.group
        for place, half in group.parity.halves_for_others(group.core.lost):
            group.core.require()
            group.send_to_holders(Sent("half", place=place, half=half))
            yield from group.await_holders()
        group.core.require()
        group.send(Sent("half"))
        while not group.core.has_halves():
            yield group.changed

    def _tell_columns(self, lost: int) -> Task[None]:
        group = self.group
        group.core.require()
        if group.core.has_told:
            return
        end = group.begin_withdrawal(lost)
        for holder, stripe, columns in group.columns(end):
            group.send_to_holders(Sent("columns", columns={holder: (stripe, columns)}))
        group.send(Sent("told", marks=self._marks, end=end))
        group.core.told_columns()
        yield from group.await_others()

    def withdraw_next(self) -> Task[None]:
        """Withdraws the next rows, and waits until the holders have most of what was sent. Raises NotHeldError."""
        self.group.withdraw_next()
        yield from self.group.await_holders(_AHEAD)

    def end(self) -> Task[None]:
        """Tells the others that this server has withdrawn all its rows, and waits until they know."""
        group = self.group
        group.core.require()
        group.send(Sent("withdrawn", marks=self._marks))
        group.core.withdrew()
        yield from group.await_others()

    def want(self, numbers: Sequence[int]) -> None:
        """Decodes the lost rows at these places of stripes before others."""
        for number in numbers:
            self.group.withdrawals.decodable.want(
                TABLE, number >> SLOT_BITS, np.array([number & (PLACES - 1)], np.int64)
            )

    def take_decoded(self) -> dict[Unit, frozenset[Batch]]:
        """Returns a few of the lost rows that can be decoded, those that are wanted first. Raises NotHeldError."""
        group = self.group
        group.core.require()
        found: dict[Unit, frozenset[Batch]] = {}
        for alone in group.withdrawals.decodable.take(_TAKEN_ROWS):
            assert alone.places.max() < PLACES
            found |= group.parity.alone(alone.stripe, alone.places.tolist())
        return found
