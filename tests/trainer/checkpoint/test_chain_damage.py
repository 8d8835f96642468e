"""Changed bytes in chains of checkpoints, which the servers' writer and the master's folder write.

The newest undamaged checkpoint restores exactly; each newer one is refused with the name of the damaged file.
"""

import os
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from tests.trainer.checkpoint.test_chains import INITIAL, Contents, Server, files_of, restored

from emberscale_api.checkpoint import CheckpointFile, DamagedCheckpointError
from emberscale_api.job import IncrementalMode
from emberscale_jobmaster.chains import Chain, builds_on
from emberscale_jobmaster.checkpoints import CheckpointFolder
from emberscale_trainer.checkpoint import Work, load_partition
from examples import examples
from master_stand_in import checkpoint_manifest

SERVERS = 2
CASES = int(os.environ.get("EMBERSCALE_DAMAGE_CASES", examples(60)))
MODES = (IncrementalMode.ONE_SHOT, IncrementalMode.CONSECUTIVE, IncrementalMode.INTERMITTENT)


class Life:
    """A job and its folder of checkpoints. Retries what the storage refuses for `patience` seconds."""

    def __init__(self, folder: Path | str, mode: IncrementalMode, keep: int = 2, patience: float = 0.0) -> None:
        self.folder, self.mode = CheckpointFolder(str(folder)), mode
        self.keep, self._patience = keep, patience
        self.number = 0
        self.at: dict[str, Contents] = {}
        self.servers = [Server(SERVERS, index) for index in range(SERVERS)]
        self.chain = Chain()
        self.chains = [self.chain]

    def work(self) -> Work:
        return Work(self._patience, missing_seconds=0)

    def all_die(self, newest: str) -> None:
        """Replaces all processes: they begin with the checkpoint `newest`, or with nothing if it is empty."""
        self.servers = [Server(SERVERS, index) for index in range(SERVERS)]
        for server in self.servers if newest else ():
            load_partition(files_of(self.folder.uri_of(newest), self.work()), server.owned, server.tables, len(INITIAL))
        self.chain = Chain()

    def master_dies(self, lost: int) -> None:
        """Replaces the master, not the servers; the next master does not know the last `lost` complete checkpoints."""
        self.chain = self.chains[max(0, len(self.chains) - 1 - lost)]

    def push(self, keys: list[int]) -> None:
        for server in self.servers:
            server.push(keys)
            server.tables.retire(1, np.array(keys[:1]))

    def save(self) -> None:
        self.number += 1
        name, since = f"{self.number:08}", builds_on(self.chain, self.mode)
        begun = [server.begin(since) for server in self.servers]
        self.at[name] = {key: row for server in self.servers for key, row in server.contents().items()}
        files: list[CheckpointFile] = []
        for server, one in zip(self.servers, begun, strict=True):
            files += server.write(one, self.folder.uri_of(name), work=self.work())
        self.folder.write(checkpoint_manifest(id=name, number=self.number, ps_count=SERVERS, files=files))
        self.chain = self.chain.followed_by(name, files)
        self.chains.append(self.chain)
        self.folder.prune(keep=self.keep)

    def newest(self) -> tuple[str, dict[str, str]]:
        """Returns the newest checkpoint that restores, which must be exact, and the errors of the newer ones."""
        refused: dict[str, str] = {}
        for name in reversed(self.folder.complete()):
            try:
                self.folder.read(name)
                found = restored(self.folder.uri_of(name), 1, self.work())
            except DamagedCheckpointError as error:
                refused[name] = str(error)
                continue
            assert found == self.at[name]
            return name, refused
        return "", refused


def manifest_files(folder: Path) -> tuple[CheckpointFile, ...]:
    return files_of(folder).manifest.files


keys = st.lists(st.integers(0, 40), min_size=1, max_size=8)


@settings(max_examples=CASES, deadline=None)
@given(st.sampled_from(MODES), st.lists(keys, min_size=3, max_size=6), st.data())
def test_a_changed_byte_anywhere_refuses_what_needs_it_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, mode: IncrementalMode, story: list[list[int]], data: st.DataObject
) -> None:
    place = tmp_path_factory.mktemp("checkpoints")
    life = Life(place, mode)
    for pushed in story:
        life.push(pushed)
        life.save()
    complete = life.folder.complete()
    needed = {
        name: {str(place / (file.checkpoint or name) / file.path) for file in files_of(place / name).manifest.files}
        for name in complete
    }
    victim = data.draw(st.sampled_from(sorted(str(path) for path in place.rglob("ps-*/*") if path.stat().st_size)))
    content = bytearray(Path(victim).read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    Path(victim).write_bytes(content)
    newest, refused = life.newest()
    expected = [name for name in complete if victim not in needed[name]]
    assert newest == max(expected, default="")
    assert set(refused) == {name for name in complete if name > newest}
    assert all("/".join(Path(victim).parts[-3:]) in problem for problem in refused.values())
