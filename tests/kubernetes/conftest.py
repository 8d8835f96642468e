"""The end-to-end suite, on the cluster that KUBECONFIG names, into which cluster.sh has loaded the images.

Its parts differ in what they do to the cluster. `files` needs no cluster. The tests of `together` share one
installation, use their own namespaces, and run in several processes at once. The tests of `alone` change what all
jobs share. Tests of `after_together` and `after_all` check what these parts have left behind.
"""

import fcntl
import re
import shlex
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from cluster import (
    IMAGE,
    KEEP,
    ROWS,
    SHARED_FOLDER,
    UNHURRIED_MODEL,
    Place,
    apply,
    kubectl,
    run_in_pod,
    setting,
)
from faults import ProcessKiller, start_process_killers
from installation import RELEASE, SYSTEM, helm_install, helm_uninstall, redis_volume

PARTS = ("files", "together", "after_together", "alone", "after_all")
SHARING = ("test_dashboards.py", "test_flash.py", "test_refused_manifests.py")
"""Modules whose tests share a fixture, or the Redis for flash checkpoints: one process runs all tests of a module."""
_LONGEST_NAMESPACE = 40

Once = Callable[[str, Callable[[], None]], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=PARTS, help="runs one part of the end-to-end suite; all of them by default")


def part_of(item: pytest.Item) -> str:
    return next((part for part in PARTS if item.get_closest_marker(part)), "together")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects the wanted part, and sorts the tests by part; within a part, `first` comes first and `last` last."""
    wanted = config.getoption("--part") or None
    config.hook.pytest_deselected(items=[item for item in items if wanted not in (None, part_of(item))])
    items[:] = [item for item in items if wanted in (None, part_of(item))]

    def order(item: pytest.Item) -> tuple[int, int]:
        marks = {name: item.get_closest_marker(name) is not None for name in ("first", "last")}
        return PARTS.index(part_of(item)), marks["last"] - marks["first"]

    items.sort(key=order)


class _Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist ships no types
    """Hands out tests one by one, except that the modules in SHARING stay together."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return module if module.endswith(SHARING) else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Scheduling:
    return _Scheduling(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Removes the installation, which the processes of pytest-xdist share."""
    if hasattr(session.config, "workerinput") or not setting(IMAGE) or setting(KEEP):
        return
    helm_uninstall()


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Once:
    """Runs a named action once per session, whichever processes ask for it; the others wait until it is done."""
    base = tmp_path_factory.getbasetemp()
    folder = base if worker_id == "master" else base.parent

    def do(name: str, what: Callable[[], None]) -> None:
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = folder / f"{name}.done"
            if not done.exists():
                what()
                done.touch()

    return do


@pytest.fixture(scope="session")
def image() -> str:
    """The image under test; without an image there is no cluster, and the tests are skipped."""
    name = setting(IMAGE)
    if not name:
        pytest.skip(
            f"NOT RUN: no cluster: {IMAGE} is not set; tests/kubernetes/cluster.sh starts one", allow_module_level=True
        )
    return name


@pytest.fixture(scope="session")
def shared_folder(image: str, once: Once) -> str:
    """A folder shared by the nodes, with data in criteo/ and a model in models/; every pod may write to it."""
    folder = setting(SHARED_FOLDER, "/var/tmp/emberscale-e2e")

    def prepare() -> None:
        apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}})
        kubectl("delete", "pod", "prepare-data", "-n", SYSTEM, "--ignore-not-found")
        script = (
            f"mkdir -p /shared/checkpoints /shared/models /shared/redis /shared/redis-plain && "
            f"printf %s {shlex.quote(UNHURRIED_MODEL.read_text())} > /shared/models/{UNHURRIED_MODEL.name} && "
            f"(test -f /shared/criteo/metadata.json || "
            f"emberscale data synth /shared/criteo --rows {ROWS} --seed 1 --parts 2) && chmod -R a+rwX /shared"
        )
        run_in_pod("prepare-data", Place(SYSTEM, folder), ["sh", "-c", script], user=0)

    once("shared-folder", prepare)
    return folder


@pytest.fixture(scope="session")
def installed(image: str, shared_folder: str, once: Once) -> str:
    """Installs the chart with Redis on a volume; returns the name of the release."""

    def install() -> None:
        apply(*redis_volume(f"{shared_folder}/redis"), namespace=SYSTEM)
        helm_install()

    once("installed", install)
    return RELEASE


@pytest.fixture(scope="session")
def killer(installed: str, once: Once) -> ProcessKiller:
    """Kills processes on their nodes."""
    once("killers", start_process_killers)
    return ProcessKiller()


@pytest.fixture
def place(installed: str, shared_folder: str, request: pytest.FixtureRequest) -> Iterator[Place]:
    """The test's own namespace, deleted with its jobs after the test."""
    name = namespace_of(request.node.name)
    kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=true", timeout=180)
    kubectl("create", "namespace", name)
    yield Place(name, shared_folder)
    kubectl("delete", "namespace", name, "--wait=false")


def namespace_of(test: str) -> str:
    """Returns a name that no other test has, and no other case of the same test."""
    words = re.sub("[^a-z0-9]+", "-", test.removeprefix("test_").lower()).strip("-")
    if len(words) <= _LONGEST_NAMESPACE:
        return words
    return f"{words[: _LONGEST_NAMESPACE - 7].strip('-')}-{zlib.crc32(test.encode()) & 0xFFFFFF:06x}"
