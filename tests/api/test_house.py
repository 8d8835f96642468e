"""What holds for the source of all components together: names, imports and layers."""

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
PACKAGES = {
    "emberscale_api": "api",
    "emberscale_brain": "brain",
    "emberscale_jobmaster": "jobmaster",
    "emberscale_operator": "operator",
    "emberscale": "sdk",
    "emberscale_simulator": "simulator",
    "emberscale_trainer": "trainer",
}


def sources() -> Iterator[Path]:
    for package, folder in PACKAGES.items():
        yield from (path for path in (ROOT / folder / package).rglob("*.py") if "_pb2" not in path.name)


def test_the_packages_are_those_that_import_linter_checks() -> None:
    assert set(CONTRACTS["root_packages"]) == set(PACKAGES)


def test_a_public_class_name_stands_for_one_thing() -> None:
    places = defaultdict(list)
    for path in sources():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"an import cycle: {' -> '.join(reversed(error.args[1]))}")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_component_has_layers_for_all_of_its_modules(package: str) -> None:
    assert any(
        contract["type"] == "layers" and contract.get("exhaustive") and package in contract["containers"]
        for contract in CONTRACTS["contracts"]
        if "containers" in contract
    )
