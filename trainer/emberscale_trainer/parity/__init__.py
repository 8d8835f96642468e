"""Parity of the rows of parameter servers, which servers keep so that lost rows of others can be rebuilt.

* `code`: the arithmetic of P and Q, and the decoding of one or two lost rows.
* `layout`: the placement of parity on servers.
* `blocks`: the bytes of parity that one server holds.
* `holding`: what a server holds for the others: parity, and the last item of each server in it.
* `withdrawals`: what live servers have taken out of the parity, so that rows of a lost one are left alone in it.
* `decodable`: the rows of a lost server that can be decoded, and which of them first.
* `places`: the places of rows in stripes, as numbers.
"""

from emberscale_trainer.parity.blocks import ParityBlocks
from emberscale_trainer.parity.holding import Holding, SourceOverError
from emberscale_trainer.parity.layout import ParityLayout

__all__ = ["Holding", "ParityBlocks", "ParityLayout", "SourceOverError"]
