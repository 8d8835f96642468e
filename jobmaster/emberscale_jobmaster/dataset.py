"""The index of all data files, as workers get it."""

import threading

from emberscale_api.rpc import master_pb2 as pb
from emberscale_jobmaster.messages import wire_file
from emberscale_jobmaster.state import PREPARATION, DataFile, JobState
from emberscale_jobmaster.store import JobStore
from emberscale_jobmaster.tasks import Split


class DatasetNotReadyError(Exception):
    """The data is not indexed yet; a worker that waits for a task learns when it is."""

    def __init__(self) -> None:
        super().__init__("the data is not indexed yet: call again")


class DatasetCatalog:
    """Reads the index from the store once, when it is complete."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._dataset: pb.Dataset | None = None

    def get(self, state: JobState) -> pb.Dataset:
        """Files and blocks of both splits. Raises DatasetNotReadyError."""
        if state.stage in PREPARATION:
            raise DatasetNotReadyError
        with self._lock:
            if self._dataset is None:
                self._dataset = self._load(state)
            return self._dataset

    def _load(self, state: JobState) -> pb.Dataset:
        by_file = {key: pb.TaskResult.FromString(blocks).blocks for key, blocks in self._store.blocks().items()}

        def blocks(split: Split, files: tuple[DataFile, ...]) -> list[pb.Block]:
            return [block for number in range(len(files)) for block in by_file[split, number]]

        return pb.Dataset(
            training_files=[wire_file(file) for file in state.training_files],
            evaluation_files=[wire_file(file) for file in state.evaluation_files],
            training_blocks=blocks(Split.TRAINING, state.training_files),
            evaluation_blocks=blocks(Split.EVALUATION, state.evaluation_files),
            training_records=state.training_records,
            evaluation_records=state.evaluation_records,
        )
