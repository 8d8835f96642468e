"""The two Redises of an installation as real servers: one for the masters' states, one for flash checkpoints."""

import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import redis

from emberscale_api.compatibility import DEPOSED_BY_DELETION, StateKeys
from emberscale_api.job import InitializerSpec, OptimizerSpec, TableSpec
from emberscale_api.routing import BUCKETS, DENSE_PIECES
from emberscale_jobmaster import takeover
from emberscale_jobmaster.flash_manifests import FlashManifests
from emberscale_jobmaster.store import JobStore
from emberscale_operator.kubernetes.flash_tenants import FlashTenants, flash_password, flash_user
from emberscale_operator.kubernetes.tenants import Tenants, user_name, user_url
from emberscale_trainer.checkpoint import FlashWriter, Share, Work, owned_rows
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.table import DensePieces, TableStore
from eventually import unwrap
from master_stand_in import checkpoint_manifest
from redis_process import RedisProcess

INSTALLATION = "system/emberscale-operator"
T = TypeVar("T", Tenants, FlashTenants)


class RedisServer(RedisProcess, ABC, Generic[T]):
    """A redis-server with a password, which loses its users when it is restarted; T makes the users."""

    scope: str
    """What the keys that a job's user reaches have in their names after the job's uid."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, password="the-operators/own@word", has_port=True)
        self.admin = redis.Redis.from_url(self.url, decode_responses=True)

    @asynccontextmanager
    async def operator(self, *jobs: str, installation: str = INSTALLATION, namespace: str = "ours") -> AsyncIterator[T]:
        """Yields the tenants of an operator that has made the users of these jobs of a namespace."""
        tenants = self.tenants(installation)
        for job in jobs:
            tenants.admit(job, namespace, f"password-{job}")
        try:
            await tenants.look()
            yield tenants
        finally:
            await tenants.close()

    @abstractmethod
    def tenants(self, installation: str) -> T:
        """Returns tenants without jobs."""

    @abstractmethod
    async def remove(self, tenants: T, job: str) -> None:
        """Tells an operator that a job is gone."""

    @abstractmethod
    def user_of(self, job: str, installation: str = INSTALLATION) -> str:
        """Returns the name of a job's user."""

    @abstractmethod
    def url_of(self, job: str, password: str = "") -> str:
        """Returns the URL for a job's user that was admitted with this password, by default that of `operator`."""

    @abstractmethod
    def write(self, job: str) -> None:
        """Writes what the processes of a job do, as the job's user."""

    def users(self) -> set[str]:
        return {str(user) for user in self.admin.acl_users()}

    def has_user_of(self, job: str) -> bool:
        return self.user_of(job) in self.users()

    def used_bytes(self) -> int:
        return int(self.admin.info("memory")["used_memory"])

    def namespaces(self) -> dict[str, str]:
        """Returns the namespaces that are kept beside the users, by job."""
        noted = self.admin.hgetall(f"{self.user_of('')}namespaces")
        return {str(job): str(namespace) for job, namespace in noted.items()}

    def contents(self, pattern: str = "*") -> dict[str, bytes]:
        """Returns all values by key, but for those that show a master that its job is gone."""
        binary, keys = redis.Redis.from_url(self.url), map(str, self.admin.keys(pattern))
        return {key: unwrap(binary.dump(key)) for key in keys if not self._deposes(key)}

    def contents_of(self, job: str) -> dict[str, bytes]:
        return self.contents(f"emberscale:{job}:*")

    def _deposes(self, key: str) -> bool:
        return key.endswith(":term") and self.admin.get(key) == str(DEPOSED_BY_DELETION)


class StateRedis(RedisServer[Tenants]):
    """The Redis of the masters' states."""

    scope = ""

    def tenants(self, installation: str) -> Tenants:
        return Tenants(self.url, installation)

    async def remove(self, tenants: Tenants, job: str) -> None:
        await tenants.remove(job)

    def user_of(self, job: str, installation: str = INSTALLATION) -> str:
        return user_name(installation, job)

    def url_of(self, job: str, password: str = "") -> str:
        return user_url(self.url, self.user_of(job), password or f"password-{job}")

    def write(self, job: str) -> None:
        """Writes under each key of a job, as a master does."""
        store = JobStore(self.url_of(job), job)
        store.open()
        store.save_blocks("train", 0, b"secret")
        store.add_bad_records([("file", 3)])
        store.save(takeover.initial(wall=1.0))
        store.close()
        assert len(self.contents_of(job)) == len(StateKeys.__dataclass_fields__)


class FlashRedis(RedisServer[FlashTenants]):
    """The Redis for flash checkpoints."""

    scope = ":flash"

    def tenants(self, installation: str) -> FlashTenants:
        return FlashTenants(self.url, installation)

    async def remove(self, tenants: FlashTenants, job: str) -> None:
        tenants.remove(job)

    def user_of(self, job: str, installation: str = INSTALLATION) -> str:
        return flash_user(installation, job)

    def url_of(self, job: str, password: str = "") -> str:
        return user_url(self.url, self.user_of(job), flash_password(password or f"password-{job}"))

    def write(self, job: str) -> None:
        """Takes three flash checkpoints of a small table, as a parameter server and a master do."""
        spec = TableSpec(0, "C1", 0, 4, OptimizerSpec(), InitializerSpec(), seed=3)
        tables = TableStore([spec], DensePieces.of(np.zeros(64, np.float32), OptimizerSpec()))
        writer, lock = FlashWriter(self.url_of(job), job, "incarnation"), threading.RLock()
        manifests = FlashManifests(self.url_of(job), job)
        for number in range(3):
            counts, name = np.array([10, 0], np.uint32), f"flash-{number:08d}"
            tables.push(counts, np.arange(10), np.ones(tables.values_per_request(counts), np.float32))
            draft = writer.begin(tables, lock, 1 << 30)
            owned = Ownership(np.ones(BUCKETS, np.bool_), np.ones(DENSE_PIECES, np.bool_))
            share = Share(0, owned, AppliedBatches(), 64, owned_rows(tables, owned))
            files = writer.write(draft, name, share, Work())
            written = checkpoint_manifest(files, id=name, number=number, job_uid=job)
            before = manifests.write(written, lambda: None)
            if before is not None:
                manifests.remove_replaced(before, written)
            tables.remove_bucket(0, number)
