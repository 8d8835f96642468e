"""Parity of the rows of parameter servers: what some servers keep so that the rows of others can be rebuilt.

`code`     the arithmetic of P and Q, and the decoding of one or two lost rows
`layout`   where the parity of which rows is
`blocks`   the bytes of it that one server holds
`holding`  what a server holds for the others: parity, and how far that of each of them goes
"""

from emberscale_trainer.parity.blocks import ParityBlocks
from emberscale_trainer.parity.holding import Holding, SourceOverError
from emberscale_trainer.parity.layout import ParityLayout

__all__ = ["Holding", "ParityBlocks", "ParityLayout", "SourceOverError"]
