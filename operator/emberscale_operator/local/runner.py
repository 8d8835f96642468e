"""One job on this machine, from the start of its processes to the end of the last one."""

import asyncio
import os
import queue
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from emberscale_api.environment import mounted_certificates
from emberscale_api.job import FlashMode, TrainingJob
from emberscale_api.job.roles import Role
from emberscale_api.start import kernel_cache
from emberscale_operator.controller import JobController
from emberscale_operator.local.backend import LocalBackend, StopRequests, policy_of
from emberscale_operator.local.brain import NO_BRAIN, BrainAddress, BrainSeat, EmbeddedBrain, end_claim
from emberscale_operator.local.embedded_redis import (
    EmbeddedRedis,
    RedisWatch,
    check_embedded_redis,
    check_given_redis,
    configure_flash_redis,
    configure_redis,
)
from emberscale_operator.local.environment import JobEnvironment
from emberscale_operator.local.folder import RunFolder, make_socket_folder, remove_socket_folder
from emberscale_operator.local.port import HOST, reserve_port
from emberscale_operator.local.process import Launch
from emberscale_operator.local.processes import JobProcesses
from emberscale_operator.local.requests import WatchedManifest
from emberscale_operator.local.snapshot import RunOutcome, RunView
from emberscale_operator.local.starters import ForkServerClient
from emberscale_operator.machine import InstanceId, Policy, Resources
from emberscale_operator.master_link import MasterAddress, MasterLink

COMMANDS: Mapping[Role, Sequence[str]] = {Role.MASTER: (sys.executable, "-P", "-m", "emberscale_jobmaster")}
"""The roles that are executed; the others are forked. `-P` keeps the working directory out of the import path."""

_STATUS_SECONDS = 0.5
_RETRY_SECONDS = 0.2
_STOP_SECONDS = 0.1
_FORK_SERVER = (sys.executable, "-P", "-m", "emberscale_trainer.fork_server")


class LocalJob:
    """A job to be run by `run`.

    Entering it makes sure of what the job needs of this machine, and raises InvalidError and UnavailableError; nothing
    is written before `run`. With a `brain`, the sizes that the manifest leaves open are planned. `suspend` and `kill`
    may be called from signal handlers.
    """

    def __init__(
        self,
        job: TrainingJob,
        uid: str,
        folder: RunFolder,
        redis_url: str | None = None,
        master_port: int = 0,
        commands: Mapping[Role, Sequence[str]] = COMMANDS,
        policy: Policy | None = None,
        brain: BrainAddress | EmbeddedBrain | None = None,
    ) -> None:
        self._job = job
        self._uid = uid
        self._folder = folder
        self._redis_url = redis_url
        self._master_port = master_port
        self._commands = commands
        self._policy = policy or policy_of(job.spec)
        self._brain = brain
        self._seat: BrainSeat | None = None
        self._authority: bytes | None = None
        self._stop = StopRequests()
        self._held = ExitStack()

    def __enter__(self) -> Self:
        if self._redis_url is None:
            check_embedded_redis()
        else:
            check_given_redis(self._redis_url)
        certificates = mounted_certificates(os.environ)
        self._authority = certificates.authority if certificates is not None else None
        port: int = self._held.enter_context(reserve_port(self._master_port)).getsockname()[1]
        self._address = f"{HOST}:{port}"
        if isinstance(self._brain, EmbeddedBrain):
            self._seat = self._held.enter_context(self._brain.seat(self._authority))
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def suspend(self) -> None:
        """Asks the job to save its state and end."""
        self._stop.suspend = True

    def kill(self) -> None:
        """Ends every process now; the state is that of the last checkpoint."""
        self._stop.kill = True

    def run(self, observer: Callable[[RunView], None]) -> RunOutcome:
        """Blocks until the job has ended and all its processes are gone.

        `observer` is called about ten times a second, by this thread; what it raises ends the job. The processes belong
        to another thread, and die with it: this one may have an event loop of its own that runs, as in a notebook.

        Raises UnavailableError if the job's own Redis does not start, and OSError if the folder cannot be written
        to; no process is left then either.
        """
        snapshots: queue.SimpleQueue[RunView | None] = queue.SimpleQueue()
        with ThreadPoolExecutor(1, thread_name_prefix="job") as thread:
            ending = thread.submit(self._run, snapshots.put)
            ending.add_done_callback(lambda _: snapshots.put(None))
            try:
                while (snapshot := snapshots.get()) is not None:
                    observer(snapshot)
            except BaseException:
                self.kill()
                raise
            return ending.result()

    def _run(self, observer: Callable[[RunView], None]) -> RunOutcome:
        folder = self._folder
        folder.make()
        with ExitStack() as cleanup:
            sockets = make_socket_folder(folder.sockets)
            cleanup.callback(remove_socket_folder, folder.sockets)
            folder.manifest.write_text(self._job.to_json(), encoding="utf-8")
            folder.master_address.write_text(self._address, encoding="utf-8")
            cleanup.callback(folder.master_address.unlink, missing_ok=True)
            token = folder.write_tokens()
            cleanup.callback(folder.token.unlink, missing_ok=True)
            cleanup.callback(folder.operator_token.unlink, missing_ok=True)
            folder.kill_request.unlink(missing_ok=True)
            redis = None
            if self._redis_url is None:
                redis = configure_redis(folder.state, sockets)
                cleanup.callback(redis.configuration.unlink, missing_ok=True)
            flash_redis = self._flash_redis(sockets)
            if flash_redis is not None:
                cleanup.callback(flash_redis.configuration.unlink, missing_ok=True)
            configuration = None
            if isinstance(self._brain, EmbeddedBrain) and self._seat is not None:
                configuration = self._brain.configure(folder, self._seat)
            environment = JobEnvironment(
                job_name=self._job.metadata.name,
                job_uid=self._uid,
                launch=uuid.uuid4().hex[:12],
                master_address=self._address,
                folder=RunFolder(folder.root.resolve()),
                redis_url=redis.url if redis is not None else self._redis_url or "",
                socket_folder=sockets,
                kernel_cache=kernel_cache(os.environ) or folder.state.resolve() / "numba",
                brain=self._brain_credentials(),
                flash_redis_url=flash_redis.url if flash_redis is not None else "",
            )
            forks = ForkServerClient(
                _FORK_SERVER, environment.of_fork_server(os.environ), folder.logs / "fork-server.log"
            )
            launcher = self._launcher(environment, (redis, flash_redis), forks, configuration)
            processes = JobProcesses(launcher, folder.logs, self._policy.stop_grace)
            cleanup.callback(processes.kill_all)
            cleanup.callback(forks.close)
            if not self._commands.keys() >= {Role.PS, Role.WORKER}:
                forks.prepare()
            return asyncio.run(self._control(processes, forks, environment, redis, token, observer))

    async def _control(
        self,
        processes: JobProcesses,
        forks: ForkServerClient,
        environment: JobEnvironment,
        redis: EmbeddedRedis | None,
        token: str,
        observer: Callable[[RunView], None],
    ) -> RunOutcome:
        """Drives the processes until the job has ended or nobody waits for that."""
        log = self._folder.logs / f"{Role.REDIS}-0.log"
        watch = RedisWatch(redis.url, log, self._folder.state) if redis is not None else None
        backend = LocalBackend(
            WatchedManifest(self._folder.manifest, self._job.spec),
            self._policy,
            processes,
            environment,
            MasterAddress(self._address, token, self._authority, "the ca.crt of EMBERSCALE_TLS_FOLDER"),
            watch,
            self._stop,
            self._folder,
            self._seat.take if self._seat is not None else lambda: False,
            observer,
        )
        clock = time.monotonic
        controller = JobController(
            backend, clock, lambda master, wake: MasterLink(master, wake, clock, _STATUS_SECONDS, _RETRY_SECONDS)
        )
        running = asyncio.create_task(controller.run())
        try:
            while not running.done() and not self._stop.kill:
                await asyncio.wait({running}, timeout=_STOP_SECONDS)
            if running.done():
                running.result()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            if watch is not None:
                await watch.close()
            forks.close()  # first: one that hangs would not tell that what it forked has ended
            processes.kill_all()
            if environment.brain.address and not backend.ended_by_master:
                await end_claim(environment.brain, self._uid)
        return backend.outcome()

    def _brain_credentials(self) -> BrainAddress:
        """Returns the address and the token of the brain, for the master."""
        if isinstance(self._brain, BrainAddress):
            return self._brain
        if self._seat is None:
            return NO_BRAIN
        return BrainAddress(self._seat.address, self._seat.token, self._authority)

    def _flash_redis(self, sockets: Path) -> EmbeddedRedis | None:
        """Returns a Redis for rows alone, so that they never delay the master's state; None if the run takes none."""
        flash = self._job.spec.checkpoint.flash
        if self._redis_url is not None or flash.mode is FlashMode.DISABLED:
            return None
        return configure_flash_redis(self._folder.state, sockets, flash.bytes_limit)

    def _launcher(
        self,
        environment: JobEnvironment,
        stores: Sequence[EmbeddedRedis | None],
        forks: ForkServerClient,
        brain: Path | None,
    ) -> Callable[[InstanceId, Resources], Launch]:
        def launch(instance: InstanceId, resources: Resources) -> Launch:
            variables = environment.of(instance, resources, os.environ)
            if instance.role is Role.BRAIN and brain is not None and isinstance(self._brain, EmbeddedBrain):
                return self._brain.launch(brain, variables)
            if instance.role is Role.REDIS and (store := stores[instance.index]) is not None:
                return store.launch(variables)
            incarnation = environment.incarnation(instance)
            if instance.role in self._commands:
                return Launch(self._commands[instance.role], variables, incarnation)
            return Launch((str(instance.role),), variables, incarnation, forks.start)

        return launch
