"""Rules for the source of all components together: names, imports and layers."""

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from statistics import median

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
LEVELS = ("debug", "info", "warning", "error", "exception", "critical")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def sources() -> Iterator[Path]:
    for package, folder in PACKAGES.items():
        yield from (path for path in (ROOT / folder / package).rglob("*.py") if "_pb2" not in path.name)


def test_the_packages_are_those_that_import_linter_checks() -> None:
    assert set(CONTRACTS["root_packages"]) == set(PACKAGES)


def test_a_class_name_stands_for_one_thing() -> None:
    places = defaultdict(list)
    for path in sources():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


SHOWN = (*sources(), *sorted((ROOT / "benchmarks").rglob("*.py")))
"""Sources that write to people, or draw for them."""
COLOUR = re.compile(r"#([0-9a-fA-F]{3,4}|[0-9a-fA-F]{6}|[0-9a-fA-F]{8})|(tab|xkcd):\w+|C\d")
UNITS = "m?s|min|h|d|seconds|minutes|hours|[KMG]i?B|[a-z]+/s"
UNIT = re.compile(rf" ?({UNITS})(?![\w/])")


def test_colours_are_named_in_one_place() -> None:
    places = defaultdict(list)
    for path in SHOWN:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and COLOUR.fullmatch(node.value):
                places[str(path.relative_to(ROOT))].append(node.value)
    assert places.pop("api/emberscale_api/pictures.py")
    assert places == {}


def rounded_by_hand(source: str) -> Iterator[str]:
    """Yields figures that an f-string rounds to digits and gives a unit, which `emberscale_api.readable` is for."""
    for text in ast.walk(ast.parse(source)):
        if isinstance(text, ast.JoinedStr):
            for figure, unit in pairwise(text.values):
                if isinstance(figure, ast.FormattedValue) and figure.format_spec and isinstance(unit, ast.Constant):
                    digits, named = re.search(r"\.\d[a-z]|g", ast.unparse(figure.format_spec)), str(unit.value)
                    if digits and UNIT.match(named):
                        yield f"{figure.lineno}: {ast.unparse(figure.value)}{named}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('f"{x:.1f} s"', True),
        ('f"{1e3 * x:,.0f} ms held"', True),
        ('f"{x:g}s"', True),
        ('f"{x:8,.0f} samples/s"', True),
        ('f"{x / 2**20:.3g} MiB"', True),
        ('f"{x:.0f} servers"', False),
        ('f"{x:,} bytes"', False),
        ('f"{duration_text(x)} s"', False),
    ],
)
def test_a_figure_that_is_rounded_by_hand_is_found(source: str, found: bool) -> None:
    assert bool([*rounded_by_hand(source)]) is found


def test_durations_sizes_and_rates_have_one_format() -> None:
    """Manifests take durations to the last digit, so what writes them is not meant."""
    exact = {"api/emberscale_api/readable.py", "api/emberscale_api/job/units.py"}
    found = {str(path.relative_to(ROOT)): places for path in SHOWN if (places := [*rounded_by_hand(path.read_text())])}
    assert {path: places for path, places in found.items() if path not in exact} == {}


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"an import cycle: {' -> '.join(reversed(error.args[1]))}")


def test_a_module_holds_a_concept_and_not_a_fragment() -> None:
    lines = [len(path.read_text().splitlines()) for path in sources()]
    assert sum(count < 40 for count in lines) <= 30
    assert median(lines) >= 120


@pytest.mark.parametrize("package", PACKAGES)
def test_every_component_has_layers_for_all_of_its_modules(package: str) -> None:
    assert any(
        contract["type"] == "layers" and contract.get("exhaustive") and package in contract["containers"]
        for contract in CONTRACTS["contracts"]
        if "containers" in contract
    )


def test_all_that_the_masters_machine_is_made_of_is_held_to_be_pure() -> None:
    (layers,) = (one["layers"] for one in CONTRACTS["contracts"] if one.get("containers") == ["emberscale_jobmaster"])
    below = layers[layers.index("machine") :]
    parts = {f"emberscale_jobmaster.{module}" for layer in below for module in re.split(r" [|:] ", layer)}
    pure = {
        module
        for one in CONTRACTS["contracts"]
        for module in one.get("source_modules", ())
        if "time" in one["forbidden_modules"]
    }
    assert parts - pure == set()


def test_log_events_are_constants_in_snake_case() -> None:
    others = [
        f"{path.name}: {ast.unparse(event)}"
        for path in sources()
        for event in log_events(path)
        if not (isinstance(event, ast.Constant) and re.fullmatch("[a-z0-9_]+", str(event.value)))
    ]
    assert others == ["runtime.py: name"], "only the master's runtime logs the event of a LogEvent"


def log_events(source: Path) -> Iterator[ast.expr]:
    for node in ast.walk(ast.parse(source.read_text())):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("_log"), attr=level), args=[event, *_]) if level in LEVELS:
                yield event
            case ast.Call(func=ast.Name("LogEvent"), args=[event, *_]):
                yield event


def test_log_events_have_only_the_keys_that_are_described() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Log events\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    described = [key for row in rows for key in re.findall(r"`(\w+)`", row)]
    assert len(described) == len(set(described)), "a key has one meaning"
    used = {key for path in sources() for key in log_keys(path)}
    assert used == {*described, "exc_info", "**fields"}, (
        "structlog takes the former, the fields of a LogEvent the latter"
    )


def log_keys(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_text())):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("_log")), keywords=keywords):
                yield from (keyword.arg or f"**{ast.unparse(keyword.value)}" for keyword in keywords)
            case ast.Call(func=ast.Name("LogEvent"), args=[_, ast.Dict(keys=keys)]):
                yield from ("" if key is None else ast.literal_eval(key) for key in keys)
            case ast.Call(func=ast.Name("LogEvent")):
                yield ast.unparse(node)


def test_every_module_that_logs_names_its_logger_alike() -> None:
    loggers = [line for path in sources() for line in path.read_text().splitlines() if "get_logger(" in line]
    assert set(loggers) == {"_log = structlog.get_logger()"}


def test_a_package_describes_modules_that_exist() -> None:
    missing = []
    for path in sources():
        if path.name == "__init__.py":
            parts = {part.stem for part in path.parent.iterdir()}
            defined = {name for source in path.parent.rglob("*.py") for name in defined_in(source)}
            words = re.findall(r"`([a-z_]+)`", ast.get_docstring(ast.parse(path.read_text())) or "")
            missing += [f"{path.parent.name}: {word}" for word in words if word not in parts | defined]
    assert missing == []


def test_a_package_describes_all_that_is_in_it() -> None:
    missing = []
    for path in sources():
        if path.name == "__init__.py":
            files = {part.stem for part in path.parent.glob("*.py")}
            modules = {name for name in files if not name.endswith(("__", "_pb2", "_grpc"))}
            packages = {part.parent.name for part in path.parent.glob("*/__init__.py")}
            words = set(re.findall(r"`(\w+)", ast.get_docstring(ast.parse(path.read_text())) or ""))
            missing += [f"{path.parent.name}: {part}" for part in (modules | packages) - words]
    assert missing == []


def defined_in(source: Path) -> Iterator[str]:
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documentation_names_source_files_that_exist(page: Path) -> None:
    """`trainer/…/table/rows.py` names a file below `trainer`, `rows.py` alone one of any component."""
    named = re.findall(r"`([\w./…-]+\.(?:py|proto|sh))`", page.read_text())
    assert [name for name in named if not is_there(name)] == []


def is_there(name: str) -> bool:
    folder, _, rest = name.rpartition("…/")
    pattern = f"{folder}*/{rest}" if folder else name if "/" in name else f"**/{name}"
    roots = [ROOT] if "/" in name else [ROOT / part for part in (*PACKAGES.values(), "benchmarks", "deploy", "tests")]
    return any(next(root.glob(pattern), None) is not None for root in roots)
