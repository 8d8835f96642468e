"""Parity of the rows of parameter servers: what one server keeps so that the rows of another can be rebuilt.

`layout`   where the parity of which rows is      `blocks`  its bytes
`holding`  what a server holds for the others: parity, and how far that of each of them goes
"""

from emberscale_trainer.parity.blocks import ParityBlocks, TableShape
from emberscale_trainer.parity.holding import Batch, Holding, SourceOverError
from emberscale_trainer.parity.layout import ParityLayout

__all__ = ["Batch", "Holding", "ParityBlocks", "ParityLayout", "SourceOverError", "TableShape"]
