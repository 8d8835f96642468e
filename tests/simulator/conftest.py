from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from emberscale_simulator.scenario import Scenario

MODEL: dict[str, Any] = {
    "architecture": "DLRM",
    "batchSize": 512,
    "workerWork": 0.3,
    "workerParallel": 0.95,
    "psWork": 0.22,
    "psParallel": 0.95,
    "batchBytes": 4.8e6,
    "requestSeconds": 2e-4,
    "fixedSeconds": 3e-3,
    "denseBytes": 1_500_000,
    "embeddingDimension": 416,
    "tables": 26,
    "rowBytes": 160,
    "workerMemory": "2Gi",
    "psBase": "256Mi",
    "tableBase": "1Gi",
    "tableLimit": "4Gi",
    "tableScaleSamples": 2e7,
    "tableExponent": 0.7,
}

MECHANICS: dict[str, Any] = {
    "as-built": {
        "change": "Live",
        "reshape": 1,
        "detection": 8,
        "resize": 10,
        "dynamicSharding": True,
        "elastic": True,
        "memoryGrowth": 1.5,
    },
    "restart": {"change": "StopAndRestart", "detection": 8, "memoryGrowth": 1.5},
}


def scenario_document(**changes: Any) -> dict[str, Any]:
    """Returns a scenario of two small jobs an hour apart on a cluster of ten nodes, without failures."""
    return {
        "name": "test",
        "horizon": "10d",
        "cluster": {
            "nodes": 10,
            "nodeCpu": 32,
            "nodeMemory": "128Gi",
            "workerBandwidth": "600M",
            "psBandwidth": "600M",
        },
        "profiling": {"noise": 0.02},
        "models": {"dlrm": MODEL},
        "workload": {
            "kind": "Rounds",
            "models": ["dlrm"],
            "steps": 20_000,
            "historyRounds": 0,
            "request": {
                "workers": {"low": 4, "high": 4},
                "ps": {"low": 2, "high": 2},
                "workerCpu": [4],
                "psCpu": [4],
                "workerMemory": "4Gi",
                "psMemory": "8Gi",
            },
            "bounds": {"maxWorkers": 8, "maxPs": 4, "maxCpu": 8},
        },
        "mechanics": MECHANICS,
        "schedulers": [
            {"name": "static", "kind": "Static", "mechanics": "as-built"},
            {"name": "well-tuned", "kind": "WellTuned", "mechanics": "as-built"},
            {"name": "elastic-scheduler", "kind": "ElasticScheduler", "mechanics": "as-built"},
            {"name": "optimus", "kind": "Optimus", "mechanics": "as-built"},
            {"name": "static-restart", "kind": "Static", "mechanics": "restart"},
        ],
        **changes,
    }


@pytest.fixture
def make_scenario() -> Callable[..., Scenario]:
    def make(**changes: Any) -> Scenario:
        return Scenario.model_validate(scenario_document(**changes))

    return make


@pytest.fixture
def write_scenario(tmp_path: Path) -> Callable[..., Path]:
    def write(**changes: Any) -> Path:
        path = tmp_path / "scenario.yaml"
        path.write_text(yaml.safe_dump(scenario_document(**changes), sort_keys=False))
        return path

    return write
