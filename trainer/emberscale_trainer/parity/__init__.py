"""Parity of the rows of parameter servers: what one server keeps so that the rows of another can be rebuilt.

`blocks`   where the parity of which rows is, and its bytes
`holding`  what a server holds for the others: parity, and how far that of each of them goes
"""

from emberscale_trainer.parity.blocks import ParityBlocks, ParityLayout, TableShape
from emberscale_trainer.parity.holding import Holding, SourceOverError

__all__ = ["Holding", "ParityBlocks", "ParityLayout", "SourceOverError", "TableShape"]
