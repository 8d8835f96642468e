"""A process's tie to its job's master: registration, heartbeats, and calls that outlive a master's restart."""

from emberscale_trainer.membership.heartbeat import Heartbeat
from emberscale_trainer.membership.master import JobOverError, MasterClient, NoHandshakeError, SupersededError

__all__ = ["Heartbeat", "JobOverError", "MasterClient", "NoHandshakeError", "SupersededError"]
