"""A hundred mistakes of users: each gives one line that says what is wrong and what to do, and starts nothing."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from emberscale._cli import app

OWN_MODELS = """
import torch

def linear(features):
    return torch.nn.Linear(2, 1)

def nothing(features):
    return None
"""
COLUMNS = "{label: y, dense: [x], categorical: [u]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A manifest and data files of all kinds."""
    folder = tmp_path_factory.mktemp("mistakes")
    zeros = "\t".join(["0"] * 40) + "\n"
    (folder / "good.tsv").write_text(zeros * 20)
    (folder / "empty.tsv").touch()
    (folder / "job.yaml").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "emberscale.io/v1alpha1",
                "kind": "TrainingJob",
                "metadata": {"name": "toy"},
                "spec": {"data": {"train": ["good.tsv"]}, "ps": {"replicas": 1}, "worker": {"replicas": 1}},
            }
        )
    )
    text = (folder / "job.yaml").read_text()
    (folder / "template.yaml").write_text(text.replace("toy", "{{ .Values.name }}"))
    (folder / "twice.yaml").write_text(text + "  worker: {replicas: 3}\n")
    (folder / "tab.yaml").write_text("spec:\n\tdata: 1\n")
    (folder / "list.yaml").write_text("- a\n")
    (folder / "empty.yaml").touch()
    (folder / "two.yaml").write_text(text + "---\n" + text)
    (folder / "pod.yaml").write_text(text.replace("emberscale.io/v1alpha1", "v1"))
    (folder / "own.py").write_text(OWN_MODELS)
    (folder / "queue.py").write_text(OWN_MODELS)
    (folder / "runs" / "ended").mkdir(parents=True)
    (folder / "runs" / "ended" / "run.json").write_text("{}")
    table = pa.table(
        {
            "y": [1, 0] * 20,
            "x": [1.0, 2.0] * 20,
            "u": ["a", "b"] * 20,
            "h": [[1, 2], [3]] * 20,
            "f": [1.5] * 40,
            "when": pa.array([0] * 40, pa.timestamp("s")),
        }
    )
    pq.write_table(table, folder / "a.parquet")
    (folder / "cut.parquet").write_bytes((folder / "a.parquet").read_bytes()[:500])
    (folder / "empty.parquet").touch()
    rows = "1,2,a\n0,3,b\n" * 20
    (folder / "a.csv").write_text("y,x,u\n" + rows)
    (folder / "semicolons.csv").write_text("y,x,u\n".replace(",", ";") + rows.replace(",", ";"))
    (folder / "returns.csv").write_text(("y,x,u\n" + rows).replace("\n", "\r"))
    (folder / "latin.csv").write_bytes(("y,x,u\n" + rows.replace("a", "M\u00fcller")).encode("latin-1"))
    (folder / "wide.csv").write_bytes(("y,x,u\n" + rows).encode("utf-16"))
    (folder / "words.csv").write_text("y,x,u\n" + "yes,2,a\n" * 20)
    (folder / "nan.csv").write_text("y,x,u\n" + "1,nan,a\n" * 20)
    for name in ("tabs.tsv", "tabs.txt"):
        (folder / name).write_text(("y,x,u\n" + rows).replace(",", "\t"))
    (folder / "headless.csv").write_text(rows)
    (folder / "twofold.csv").write_text("y,x,u,x\n" + "1,2,a,2\n" * 20)
    (folder / "header.csv").write_text("y,x,u\n")
    (folder / "huge.csv").write_text("y,x,u\n" + "1,1e300,a\n" * 20)
    (folder / "empty.csv").touch()
    (folder / "packed.csv").write_bytes(b"\x1f\x8b\x08\0\0")
    (folder / "array.npy").write_bytes(b"\x93NUMPY\1\0")
    return folder


@pytest.fixture(autouse=True)
def _in_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("KUBECONFIG", str(folder / "no-kubeconfig"))


def files(name: str, columns: str = COLUMNS, kind: str = "Parquet") -> str:
    return f"spec.data={{format: {kind}, train: [{name}], columns: {columns}}}"


def csv(name: str, columns: str = COLUMNS) -> str:
    return files(name, columns, "CSV")


SETTINGS: list[tuple[str | Sequence[str], Sequence[str]]] = [
    # misspelt words
    ("spec.model.architecture=DLMR", ["spec.model.architecture", "did you mean DLRM?"]),
    ("spec.model.architecture=dlrm", ["did you mean DLRM?"]),
    ("spec.model.architecture=DeepFM", ["did you mean XDeepFM?"]),
    ("spec.model.architecture=wide-and-deep", ["did you mean WideAndDeep?"]),
    ("spec.model.architecture=GPT", ["must be 'DLRM', 'WideAndDeep', 'XDeepFM' or 'DCNv2' (got 'GPT')"]),
    ("spec.optimizers.sparse.type=adagrad", ["spec.optimizers.sparse.type", "did you mean Adagrad?"]),
    ("spec.optimizers.sparse.type=AdamW", ["did you mean Adam?"]),
    ("spec.data.format=parquet", ["did you mean Parquet?"]),
    ("spec.data.format=criteo_tsv", ["did you mean CriteoTSV?"]),
    ("spec.scaling.mode=auto", ["did you mean Auto?"]),
    ("spec.model.embeddings.pooling=avg", ["must be 'Sum' or 'Mean'"]),
    ("spec.model.embeddings.initializer.type=Xavier", ["must be 'Uniform', 'Normal' or 'Zeros'"]),
    ("spec.runPolicy.cleanPodPolicy=none", ["did you mean None?"]),
    ("kind=trainingjob", ["did you mean TrainingJob?"]),
    # unknown fields
    ("spec.training.batch_siz=3", ["spec.training.batch_siz: unknown field (did you mean batchSize?)"]),
    ("spec.training.batchsize=3", ["did you mean batchSize?"]),
    ("spec.image=x", ["spec.image: unknown field (did you mean spec.master.template.image or"]),
    ("spec.runPolicy.activeDeadlineSeconds=10", ["did you mean activeDeadline?"]),
    ("spec.runPolicy.ttlSecondsAfterFinished=10", ["did you mean ttlAfterFinished?"]),
    ("spec.worker.template.spec.containers=[]", ["spec.worker.template.spec: unknown field", "allowed here: affinity"]),
    ("spec.worker.resources.limits.memory=1kb", ["did you mean 1Ki?"]),
    ("spec.runPolicy.activeDeadline=soon", ["'soon' is not a duration: write 90s, 5m or 1h30m"]),
    ("spec.training.batch-size=3", ["did you mean batchSize?"]),
    ("spec.worker.replica=3", ["did you mean replicas?"]),
    ("spec.workers.replicas=2", ["spec.workers", "did you mean worker?"]),
    ("spec.optimizer.dense.type=SGD", ["did you mean optimizers?"]),
    ("spec.batchSize=3", ["did you mean spec.training.batchSize?"]),
    ("training.epochs=1", ["training: unknown field (did you mean spec.training?)"]),
    ("spec.learningRate=0.1", ["spec.optimizers.sparse.learningRate or spec.optimizers.dense.learningRate"]),
    ("spec.optimizers.learningRate=0.1", ["allowed here: dense, sparse, wide"]),
    ("spec.optimizers.sparse.lr=0.1", ["spec.optimizers.sparse.lr", "learningRate"]),
    ("spec.worker.memory=1Gi", ["spec.worker.memory", "spec.master.resources.requests.memory"]),
    ("spec.worker.resources={memory: 3Gi}", ["spec.worker.resources.memory", "allowed here: limits, requests"]),
    # values of the wrong kind
    ("spec.training.batchSize=2k", ["spec.training.batchSize: must be a whole number (got '2k')"]),
    ("spec.training.batchSize=1.5", ["must be a whole number (got 1.5)"]),
    ("spec.training.batchSize=''", ["must be a whole number (got '')"]),
    ("spec.training.batchSize=0", ["must be greater than or equal to 1 (got 0)"]),
    ("spec.training.batchSize=99999999", ["must be less than or equal to 1048576"]),
    ("spec.training=", ["spec.training: must be a mapping of fields (it is empty)", "batchSize"]),
    ("spec.training.epochs=-1", ["spec.training.epochs", "greater than or equal to 1"]),
    ("spec.training.seed=-1", ["spec.training.seed", "greater than or equal to 0"]),
    ("spec.optimizers.sparse.learningRate=-1", ["must be greater than 0 (got -1)"]),
    ("spec.optimizers.sparse.learningRate=fast", ["must be a number (got 'fast')"]),
    ("spec.optimizers.sparse=Adam", ["spec.optimizers.sparse: must be a mapping of fields (got 'Adam')", "type"]),
    ("spec.model.topMlp=64", ["spec.model.topMlp: must be a list, such as [64]"]),
    ("spec.model.topMlp=[64, x]", ["spec.model.topMlp.1: must be a whole number"]),
    ("spec.model.topMlp=[0]", ["spec.model.topMlp.0", "greater than or equal to 1"]),
    ("spec.model.embeddings.dimension=16.5", ["spec.model.embeddings.dimension: must be a whole number"]),
    ("spec.suspend=maybe", ["spec.suspend: must be true or false"]),
    ("metadata.name=123", ["metadata.name: must be text: write it in quotes"]),
    ("metadata.name=My_Job", ["metadata.name: must be lower-case letters, digits and '-'"]),
    ("metadata=", ["metadata: must be a mapping of fields", "name"]),
    # amounts and times
    ("spec.worker.resources.limits.memory=3GB", ["spec.worker.resources.limits.memory", "did you mean 3Gi?"]),
    ("spec.worker.resources.limits.memory=lots", ["is not a Kubernetes quantity, such as 500m or 2Gi"]),
    (
        "spec.worker.resources.limits.memory=512m",
        ["spec.worker.resources.limits.memory: must be at least 1Mi, not 512m: 512Mi are mebibytes"],
    ),
    ("spec.worker.resources.limits.cpu=0", ["spec.worker.resources.limits.cpu: must be above 0"]),
    (
        "spec.worker.resources={requests: {cpu: 2}, limits: {cpu: 1}}",
        ["requests.cpu (2) must not be above limits.cpu (1)"],
    ),
    ("spec.checkpoint.interval=5 minutes", ["spec.checkpoint.interval", "write 90s, 5m or 1h30m"]),
    ("spec.checkpoint.interval=0", ["spec.checkpoint.interval: must be greater than 0"]),
    ("spec.checkpoint.keep=0", ["spec.checkpoint.keep: must be greater than or equal to 1"]),
    ("spec.sharding.leaseTimeout=1s", ["leaseTimeout (1s) must be at least twice heartbeatInterval (1s)"]),
    ("spec.sharding={minBatches: 9, maxBatches: 2}", ["minBatches (9) must not be above maxBatches (2)"]),
    ("spec.worker={minReplicas: 4, maxReplicas: 2}", ["minReplicas (4) must not be above maxReplicas (2)"]),
    ("spec.ps={replicas: 3, minReplicas: 2}", ["spec.ps: give either replicas, or minReplicas and maxReplicas"]),
    # models
    ("spec.optimizers.dense.type=FTRL", ["spec.optimizers.dense.type", "use SGD, Momentum, Adagrad or Adam"]),
    ("spec.model.embeddings.tables.C99={}", ["spec.model.embeddings.tables.C99", "there are C1, C2"]),
    ("spec.model.embeddings.tables.C1.dimension=8", ["all dimensions must be equal", "WideAndDeep and DCNv2 take any"]),
    ("spec.model.embeddings.tables.C1.pooling=Mean", ["only the columns in spec.data.columns.lists are pooled"]),
    ("spec.model={architecture: DLRM, entrypoint: 'own:linear'}", ["give either architecture"]),
    ("spec.model={entrypoint: own.linear}", ["spec.model.entrypoint", "such as package.module:factory"]),
    ("spec.model={entrypoint: '__main__:factory'}", ["put the function into a file beside it, such as model.py"]),
    ("spec.model={entrypoint: 'nowhere:factory'}", ["there is no module nowhere"]),
    ("spec.model={entrypoint: 'own:missing'}", ["has no missing; what can be called there: linear, nothing"]),
    ("spec.model={entrypoint: 'own:nothing'}", ["returned an object of type NoneType; expected a torch.nn.Module"]),
    ("spec.model={entrypoint: 'queue:linear'}", ["queue.py has no linear", "queue.py here has its name: rename it"]),
    ("spec.model={entrypoint: 'time:linear'}", ["the module time has no linear; what can be called there: "]),
    ("spec.model={entrypoint: 'own:linear'}", ["forward(dense, embeddings) with dense [B, 13]", "raised TypeError"]),
    # data
    ("spec.data.train=good.tsv", ["spec.data.train: must be a list, such as [good.tsv]"]),
    ("spec.data.train=[]", ["spec.data.train: must have at least 1 item, and has 0"]),
    ("spec.data.train=['']", ["spec.data.train.0: must have at least 1 character"]),
    ("spec.data.train=[nowhere.tsv]", ["nowhere.tsv: no such file", "`emberscale data synth OUT`"]),
    ("spec.data.evaluation=['day-*.tsv']", ["spec.data.evaluation.0: day-*.tsv: no such file"]),
    ("spec.data.train=[.]", ["is a folder; name its files, such as *.tsv"]),
    (csv("."), ["spec.data.train.0: .: is a folder; name its files, such as *.csv"]),
    ("spec.checkpoint.initialFrom={uri: x, id: '7'}", ["must have at least 8 digits, such as '00000007' (got '7')"]),
    ("spec.data.train=['nosuch://b/x.tsv']", ["spec.data.train.0: nosuch://b/x.tsv: no file system for it"]),
    ("spec.data.train=['gs://b/x.tsv']", ["no file system for it is installed", "gcsfs"]),
    ("spec.data.train=[a.parquet]", ["is a Parquet file: set spec.data.format to Parquet"]),
    ("spec.data.train=[a.csv]", ["none of its first", "expected 40 fields separated by tabs, found 1"]),
    ("spec.data.format=CSV", ["spec.data: columns is required for format CSV"]),
    (f"spec.data.columns={COLUMNS}", ["columns must not be given for format CriteoTSV"]),
    (files("a.csv"), ["is not a Parquet file: set spec.data.format to"]),
    (files("cut.parquet"), ["is a Parquet file that was cut short: write or copy it again"]),
    (files("empty.parquet"), ["is empty: write or copy it again"]),
    (
        files("a.parquet", "{label: clicked, dense: [x], categorical: [u]}"),
        ["has no column 'clicked'", "it has y (int64)"],
    ),
    (files("a.parquet", "{label: y, dense: [u], categorical: [h]}"), ["column 'u'", "dense features are numbers"]),
    (files("a.parquet", "{label: y, dense: [when], categorical: [u]}"), ["column 'when'", "is timestamp"]),
    (files("a.parquet", "{label: y, dense: [x], categorical: [f]}"), ["is double", "its type Int64"]),
    (files("a.parquet", "{label: y, dense: [x], categorical: [h]}"), ["name it in spec.data.columns.lists"]),
    (files("a.parquet", "{label: y, dense: [x], lists: [{name: u}]}"), ["column 'u'", "lists hold ids"]),
    (files("a.parquet", "{label: y, dense: [x], lists: [h]}"), ["lists.0: must be a mapping of fields", "name"]),
    (files("a.parquet", "{label: y, dense: x, categorical: [u]}"), ["must be a list, such as [x]"]),
    (files("a.parquet", "{label: y, dense: [x, x], categorical: [u]}"), ["each column can be used once, but x"]),
    (files("a.parquet", "{label: y, dense: [x]}"), ["name at least one column in categorical or lists"]),
    (files("a.parquet", "{label: y, categorical: [u]}"), ["DLRM without dense features needs two columns of ids"]),
    (
        files("a.parquet", "{label: y, dense: [x], categorical: [u], denseTransform: log}"),
        ["denseTransform", "did you mean Log1p?"],
    ),
    (
        files("a.parquet", "{label: y, dense: [x], categorical: [u], denseTransforms: {z: Log1p}}"),
        ["denseTransforms names z: add it to dense"],
    ),
    (csv("a.parquet"), ["is a Parquet file: set spec.data.format to Parquet"]),
    (csv("array.npy"), ["is a NumPy file: write Parquet or CSV instead"]),
    (csv("packed.csv"), ["is compressed with gzip: give it a name that ends in .gz"]),
    (csv("latin.csv"), ["is not UTF-8 text: line 2 has the byte 0xfc", "iconv -f LATIN1 -t UTF-8"]),
    (csv("wide.csv"), ["is UTF-16 text", "iconv -f UTF-16 -t UTF-8"]),
    (csv("empty.csv"), ["is empty: it has no header"]),
    (csv("semicolons.csv"), ["has no column 'y'", 'set spec.data.csv.delimiter (--delimiter) to ";"']),
    (csv("tabs.txt"), ["has no column 'y'", r'set spec.data.csv.delimiter (--delimiter) to "\t"']),
    (csv("headless.csv"), ["has no column 'y'", "set spec.data.csv.header to false", "column_1"]),
    (csv("twofold.csv"), ["has 2 columns 'x'"]),
    (csv("header.csv"), ["spec.data.train: the files contain no records"]),
    (
        csv("huge.csv", COLUMNS.replace("}", ", denseTransform: Log1p}")),
        ["huge.csv:2: x is '1e300', not a finite number of 32 bits"],
    ),
    (csv("words.csv"), ["words.csv:2: the label, y, is 'yes', neither 0 nor 1"]),
    (csv("nan.csv"), ["nan.csv:2: x is 'nan', not a finite number"]),
    ([csv("a.csv"), "spec.data.csv.delimiter=tab"], ["spec.data.csv.delimiter: must be one ASCII character"]),
    ([csv("a.csv"), r"spec.data.csv.delimiter='\t'"], [r'a tab: YAML reads "\t" in double quotes as a tab']),
    ([csv("a.csv"), "spec.data.csv.delimiter='|'"], ["delimiter and listSeparator must differ"]),
    # --set itself
    ("spec.training.epochs", ["--set 'spec.training.epochs': expected dotted.path=value"]),
    ("=1", ["--set '=1': expected dotted.path=value"]),
    ("spec.training.epochs=[1", ["the value is not valid YAML"]),
    ("spec.data.train.0=x", ["spec.data.train is a list: replace the whole list"]),
    # places
    ("spec.checkpoint.uri=nosuch://x", ["spec.checkpoint.uri: nosuch://x: Protocol not known"]),
    ("spec.checkpoint.uri=good.tsv/below", ["spec.checkpoint.uri: good.tsv/below cannot be created"]),
]
COMMANDS: list[tuple[str, Sequence[str]]] = [
    ("run twice.yaml", ["twice.yaml:", "'worker' appears twice"]),
    ("run template.yaml", ["template.yaml:", "render the template first, and quote text"]),
    ("run tab.yaml", ["tab.yaml:2: is not valid YAML", "cannot start any token"]),
    ("run list.yaml", ["list.yaml: contains no TrainingJob: expected a mapping with apiVersion"]),
    ("run empty.yaml", ["empty.yaml: contains no TrainingJob"]),
    ("run two.yaml", ["expected a single document"]),
    ("run pod.yaml", ["pod.yaml: apiVersion: must be 'emberscale.io/v1alpha1' (got 'v1')"]),
    ("run .", [".: cannot be read: Is a directory"]),
    ("run nowhere.yaml", ["nowhere.yaml: cannot be read: No such file or directory"]),
    ("run a.parquet", ["a.parquet: is not UTF-8 text"]),
    ("run job.yaml --resume", ["--resume: runs/toy holds no run; start one without --resume"]),
    ("run job.yaml --resume --overwrite", ["--resume and --overwrite contradict each other"]),
    ("run job.yaml --workdir job.yaml", ["job.yaml is not a folder: name another with --workdir"]),
    ("run job.yaml --workdir .", ["is not empty and holds no run.json: choose another folder with --workdir"]),
    ("run job.yaml --brain nowhere", ["--brain 'nowhere': expected auto, off or HOST:PORT"]),
    ("run job.yaml --redis localhost", ["--redis localhost", "redis://"]),
    ("run job.yaml --redis redis://127.0.0.1:1", ["--redis redis://127.0.0.1:1", "Connection refused"]),
    ("audit nowhere", ["nowhere: holds no run: run.json is missing"]),
    ("export nowhere out", ["RUN: nowhere is neither the folder of a run nor one of checkpoints"]),
    ("compare nowhere", ["name at least two runs to compare"]),
    ("compare nowhere elsewhere", ["nowhere: holds no run"]),
    ("explain-plan nowhere", ["nowhere", "is the folder of a run"]),
    ("profile nowhere.yaml", ["nowhere.yaml: cannot be read"]),
    ("data inspect nowhere*.tsv", ["nowhere*.tsv: matches no file"]),
    ("data inspect a.parquet", ["describe its columns, with --label", "it has y (int64)"]),
    ("data inspect a.parquet --label y --dense x", ["name at least one column in categorical or lists"]),
    ("data inspect a.parquet --from csv --label y --categorical u", ["is a Parquet file", "--from parquet"]),
    ("data convert latin.csv b.parquet --label y --dense x --categorical u", ["latin.csv:2: u is not UTF-8 text"]),
    ("data inspect returns.csv --label y --categorical u", ["returns.csv: its lines end in carriage returns alone"]),
    ("data inspect .", ["is a folder"]),
    ("data inspect tabs.tsv", ["found 3", "--from csv --delimiter '\\t'"]),
    ("data inspect semicolons.csv", ["pass --delimiter ';'", "--label"]),
    ("data convert a.csv", ["give at least two paths"]),
    ("data convert a.csv b.xyz --label y --categorical u", ["choose the format with --format: criteo, parquet, csv"]),
    ("data convert a.csv a.csv --label y --categorical u", ["is one of the files to read; choose another path"]),
    ("data convert a.csv b.parquet --label y --categorical u --compression lzo", ["can have none, snappy, gzip, zstd"]),
    ("data synth job.yaml", ["exists and holds no data set of this generator: choose another path"]),
    ("data synth new --rows -5", ["rows must be at least 1 (got -5)"]),
    ("status toy", ["no cluster", "set KUBECONFIG"]),
    ("status ended", ["error: no cluster", "; this command is for jobs on a cluster, and runs/ended holds"]),
    ("logs ended worker-0", ["error: no cluster", "; this command is for jobs on a cluster, and runs/ended holds"]),
    ("submit job.yaml", ["no cluster", "set KUBECONFIG"]),
    ("simulate job.yaml", ["job.yaml:1:1: holds a TrainingJob and no scenario; `emberscale run` runs a TrainingJob"]),
    ("simulate nowhere.yaml", ["nowhere.yaml: cannot be read"]),
]


def assert_told(arguments: Sequence[str], words: Sequence[str]) -> None:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, result.stdout) == (2, "")
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    for part in words:
        assert part in lines[0]
    assert not Path("runs", "toy", "run.json").exists()


def test_there_are_a_hundred_and_more() -> None:
    assert len(SETTINGS) + len(COMMANDS) >= 100


@pytest.mark.parametrize(("settings", "words"), SETTINGS)
def test_a_setting_that_cannot_be(settings: str | Sequence[str], words: Sequence[str]) -> None:
    given = [settings] if isinstance(settings, str) else settings
    assert_told(["run", "job.yaml", *(part for setting in given for part in ("--set", setting))], words)


@pytest.mark.parametrize(("command", "words"), COMMANDS)
def test_a_command_that_cannot_be(command: str, words: Sequence[str]) -> None:
    assert_told(command.split(), words)


@pytest.mark.parametrize(
    "settings",
    [csv("semicolons.csv"), files("a.parquet", "{label: y, dense: [u], categorical: [h]}"), csv("latin.csv")],
)
def test_validate_refuses_what_run_refuses(settings: str) -> None:
    assert_told(["validate", "job.yaml", "--set", settings], [])
