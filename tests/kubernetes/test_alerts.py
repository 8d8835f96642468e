"""promtool evaluates every alert on made-up series: each fires on its cause, and on nothing else."""

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from api_server import api_server
from emberscale_operator.kubernetes.client import ApiClient, ApiError, ApiUnavailableError
from emberscale_operator.kubernetes.tenants import Tenants
from ports import free_port
from prometheus_server import alerts, promtool_finds

pytestmark = pytest.mark.files

LABELS = 'namespace="n", training_job="j"'
LONG = "x700"
"""700 more values at intervals of 15 s: three hours."""


@dataclass(frozen=True)
class Case:
    """Series in promtool's notation with one value per `interval`, and whether an alert fires on them at a time."""

    alert: str
    what: str
    fires: bool
    series: Mapping[str, str]
    at: str = "60m"
    interval: str = "15s"

    def __str__(self) -> str:
        return f"{self.alert}: {self.what}"


def phase(name: str, values: str = f"1{LONG}") -> dict[str, str]:
    return {f'emberscale_job_phase{{{LABELS}, phase="{name}"}}': values}


def up(component: str, values: str = f"1{LONG}", index: int = 0) -> dict[str, str]:
    return {f'up{{{LABELS}, component="{component}", index="{index}"}}': values}


def samples(values: str, index: int = 0) -> dict[str, str]:
    return {f'emberscale_samples_total{{{LABELS}, component="worker", index="{index}"}}': values}


def pulls(values: str) -> dict[str, str]:
    return {f'emberscale_stage_seconds_total{{{LABELS}, component="ps", index="0", stage="pull"}}': values}


def servers(cpu_seconds: float, lock_seconds: float) -> dict[str, str]:
    """A server limited to 0.2 cores, with its CPU use and its time under the lock per second; and an unlimited one."""
    labels = 'component="ps", namespace="n", training_job="j", index="0"'
    free = 'component="ps", namespace="n", training_job="free", index="0"'
    return {
        f"up{{{labels}}}": "1x120",
        f"emberscale_cpu_limit_cores{{{labels}}}": "0.2x120",
        f"emberscale_cpu_seconds_total{{{labels}}}": f"0+{cpu_seconds * 15}x120",
        f'emberscale_stage_seconds_total{{{labels}, stage="push"}}': f"0+{lock_seconds * 15}x120",
        f'emberscale_stage_seconds_total{{{labels}, stage="hold"}}': "0+150x120",
        f"up{{{free}}}": "1x120",
        f"emberscale_cpu_seconds_total{{{free}}}": "0+60x120",
        f'emberscale_stage_seconds_total{{{free}, stage="push"}}': "0+1.5x120",
    }


def degraded(values: str) -> dict[str, str]:
    return {f'emberscale_flash_checkpoint_degraded{{{LABELS}, component="master"}}': values}


def protected(values: str) -> dict[str, str]:
    return {f'emberscale_job_protected{{{LABELS}, component="master"}}': values}


def operator(name: str, values: str, namespace: str = "emberscale-system") -> dict[str, str]:
    return {f'emberscale_{name}{{namespace="{namespace}", instance="10.0.0.1:9090"}}': values}


def rounds(failed: str, made: str) -> dict[str, str]:
    """Rounds of planning of the brain, with the increase between two scrapes."""
    labels = 'namespace="emberscale-system", instance="10.0.0.2:9461"'
    return {
        f'emberscale_brain_planning_failures_total{{{labels}, how="timed out"}}': f"{failed}{LONG}",
        f"emberscale_brain_planning_seconds_count{{{labels}}}": f"{made}{LONG}",
    }


def calls(answered: int, refused: int, namespace: str = "emberscale-system") -> dict[str, str]:
    """Calls to create pods, so many between two scrapes, of which some are answered and others refused."""
    labels = f'namespace="{namespace}", instance="10.0.0.1:9090", verb="POST", resource="pods"'
    return {
        f"emberscale_operator_api_calls_total{{{labels}}}": f"0+{answered + refused}{LONG}",
        f'emberscale_operator_api_refused_total{{{labels}, status="500"}}': f"0+{refused}{LONG}",
    }


TRAINING = phase("Training") | up("master")
RECOVERIES = f"emberscale_recoveries_total{{{LABELS}}}"
STALLED = "EmberscaleTrainingStalled"
STUCK = "EmberscaleJobStuck"
FAILED = "EmberscaleJobFailed"
UNSCRAPED = "EmberscaleJobNotScraped"
SATURATED = "EmberscaleParameterServersSaturated"
FLASH = "EmberscaleFlashCheckpointsFail"
UNPROTECTED = "EmberscaleJobUnprotected"

CASES = [
    Case(STALLED, "its workers are gone", True, TRAINING),
    Case(STALLED, "its workers do nothing", True, TRAINING | samples(f"100{LONG}")),
    Case(STALLED, "its master is gone with the workers", True, phase("Training") | up("master", "1x60")),
    Case(STALLED, "it trains", False, TRAINING | samples(f"0+100{LONG}")),
    Case(STALLED, "it trains and is scraped every 2 minutes", False, TRAINING | samples("0+100x60"), interval="2m"),
    Case(STALLED, "it was never scraped", False, phase("Training")),
    Case(STALLED, "no scrape is answered", False, phase("Training") | up("master", f"0{LONG}")),
    Case(STALLED, "no scrape is answered any more", False, phase("Training") | up("master", f"1x60 0{LONG}")),
    Case(STALLED, "it was in another phase until now", False, phase("Training", f"_x205 1{LONG}") | up("master")),
    *(Case(STUCK, name, True, phase(name)) for name in ("Pending", "Preparing", "Restoring", "Suspending", "Saving")),
    Case(STUCK, "its status cannot be read", True, phase("Unknown")),
    Case(STUCK, "from Pending to Restoring", True, phase("Pending", "1x120") | phase("Restoring", f"_x121 1{LONG}")),
    Case(STUCK, "nothing is pulled for its evaluation", True, phase("Evaluating") | pulls(f"9{LONG}")),
    Case(STUCK, "it evaluates", False, phase("Evaluating") | pulls(f"0+1{LONG}")),
    *(Case(STUCK, name, False, phase(name)) for name in ("Training", "Suspended", "Complete", "Failed")),
    Case(STUCK, "it was created 25 minutes ago", False, phase("Pending"), at="25m"),
    Case(FAILED, "it trained", True, phase("Training", "1x400 _x300") | phase("Failed", f"_x401 1{LONG}"), at="2h"),
    Case(FAILED, "it failed as it was created", True, phase("Failed", f"_x441 1{LONG}"), at="2h"),
    Case(
        FAILED,
        "another of the same name has failed before",
        True,
        phase("Failed", f"1x300 _x100 1{LONG}") | phase("Training", "_x301 1x99 _x300"),
        at="2h",
    ),
    Case(FAILED, "long ago", False, phase("Training", "1x60 _x600") | phase("Failed", f"_x61 1{LONG}"), at="2h"),
    Case(
        FAILED,
        "long ago, and the operator was replaced since",
        False,
        phase("Failed", f"1x230 _x200 1{LONG}") | phase("Unknown", "_x429 1x2 _x300"),
        at="2h",
    ),
    Case(FAILED, "it is complete", False, phase("Complete")),
    Case(UNSCRAPED, "there is no target", True, phase("Training")),
    Case(UNSCRAPED, "the target does not answer", True, phase("Training") | up("master", f"0{LONG}")),
    Case(UNSCRAPED, "the target answers", False, TRAINING),
    Case(UNSCRAPED, "it rests", False, phase("Suspended")),
    Case("EmberscaleRecoversOften", "9 times in 36 minutes", True, {RECOVERIES: "0+1x9 9x9"}, interval="4m"),
    Case("EmberscaleRecoversOften", "once", False, {RECOVERIES: f"0x100 1{LONG}"}),
    *(
        Case(
            "EmberscaleWorkerStraggles",
            f"a rate of {rate} where others have 100",
            rate < 30,
            samples(f"0+{rate}{LONG}") | samples(f"0+100{LONG}", 1) | samples(f"0+100{LONG}", 2),
        )
        for rate in (20, 60)
    ),
    Case(SATURATED, "at its CPU limit", True, servers(0.2, 0.05), at="20m"),
    Case(SATURATED, "its lock is always held", True, servers(0.1, 0.95), at="20m"),
    Case(SATURATED, "it has time to spare", False, servers(0.1, 0.5), at="20m"),
    Case(FLASH, "for 15 minutes", True, degraded(f"0x180 1{LONG}")),
    Case(FLASH, "for 5 minutes", False, degraded(f"0x220 1{LONG}")),
    Case(FLASH, "now and then", False, degraded(" ".join(["0x20 1x20"] * 20))),
    Case(FLASH, "they are taken", False, degraded(f"0{LONG}")),
    Case(FLASH, "there is no Redis for them", False, TRAINING),
    Case(UNPROTECTED, "for 15 minutes", True, TRAINING | protected(f"1x180 0{LONG}")),
    Case(UNPROTECTED, "while it evaluates", True, phase("Evaluating") | protected(f"0{LONG}")),
    Case(UNPROTECTED, "its phase is not known", True, protected(f"0{LONG}")),
    Case(UNPROTECTED, "for 5 minutes", False, TRAINING | protected(f"1x220 0{LONG}")),
    Case(UNPROTECTED, "now and then", False, TRAINING | protected(" ".join(["1x20 0x20"] * 20))),
    Case(UNPROTECTED, "it is protected", False, TRAINING | protected(f"1{LONG}")),
    Case(UNPROTECTED, "it waits for its servers", False, phase("Pending") | protected(f"0{LONG}")),
    Case(UNPROTECTED, "it keeps no parity", False, TRAINING),
    Case("EmberscaleOperatorDown", "it is gone", True, operator("redis_up", "1x60")),
    Case("EmberscaleOperatorDown", "another runs elsewhere", True, operator("redis_up", f"1{LONG}", "x")),
    Case("EmberscaleOperatorDown", "it only waits", True, operator("operator_defects_total", f"0{LONG}")),
    Case("EmberscaleOperatorDown", "it runs, without Redis", False, operator("redis_up", f"0{LONG}")),
    Case("EmberscaleOperatorDefects", "one more", True, operator("operator_defects_total", f"0x220 1{LONG}")),
    Case("EmberscaleOperatorDefects", "a job's", False, operator("operator_defects_total", f"0x220 1{LONG}", "x")),
    Case("EmberscaleOperatorDefects", "none lately", False, operator("operator_defects_total", f"3{LONG}")),
    Case("EmberscaleApiCallsRefused", "most", True, calls(1, 3)),
    Case("EmberscaleApiCallsRefused", "a job says so", False, calls(1, 3, "x")),
    Case("EmberscaleApiCallsRefused", "a few", False, calls(3, 1)),
    Case("EmberscaleRedisDown", "it is", True, operator("redis_up", f"1x100 0{LONG}")),
    Case("EmberscaleRedisDown", "a job says so", False, operator("redis_up", f"1x100 0{LONG}", "x")),
    Case("EmberscaleRedisDown", "it is not", False, operator("redis_up", f"1{LONG}")),
    Case("EmberscaleRedisFillsUp", "above", True, operator("redis_memory_ratio", f"0.75{LONG}")),
    Case("EmberscaleRedisFillsUp", "a job says so", False, operator("redis_memory_ratio", f"0.75{LONG}", "x")),
    Case("EmberscaleRedisFillsUp", "below", False, operator("redis_memory_ratio", f"0.65{LONG}")),
    Case("EmberscaleBrainDown", "it is gone", True, operator("brain_jobs", "0x60")),
    Case("EmberscaleBrainDown", "it runs", False, operator("brain_jobs", f"0{LONG}")),
    Case("EmberscaleBrainDatabaseDown", "it is", True, operator("brain_database_up", f"1x100 0{LONG}")),
    Case("EmberscaleBrainDatabaseDown", "it is not", False, operator("brain_database_up", f"1{LONG}")),
    Case("EmberscaleBrainDatabaseDown", "a job says so", False, operator("brain_database_up", f"0{LONG}", "x")),
    Case("EmberscalePlanningFails", "each round fails", True, rounds(failed="1+0.1", made="50+0"), at="120m"),
    Case("EmberscalePlanningFails", "each plan is refused", True, rounds(failed="1+0.1", made="50+0.1"), at="120m"),
    Case("EmberscalePlanningFails", "one round fails", False, rounds(failed="1+0.01", made="50+0.1"), at="120m"),
    Case("EmberscalePlanningFails", "there are no jobs", False, rounds(failed="7+0", made="50+0"), at="120m"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_alert_fires_on_what_it_is_for_alone(case: Case, tmp_path: Path) -> None:
    asked = f'count(ALERTS{{alertname="{case.alert}", alertstate="firing", namespace!=""}})'
    answer = [{"labels": "{}", "value": 1}] if case.fires else []
    promtool_finds({asked: answer}, case.series, case.at, case.interval, tmp_path, case.alert)


def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    for fires in (True, False):
        assert {case.alert for case in CASES if case.fires is fires} == {alert["alert"] for alert in alerts()}


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: str(alert["alert"]))
def test_an_alert_says_what_to_call_first_in_its_namespace(alert: Mapping[str, Mapping[str, str]]) -> None:
    (command, *_) = re.findall(r"`(kubectl [^`]*)`", alert["annotations"]["description"])
    assert "-n {{ $labels.namespace }}" in command


def found_in(told: list[Any], alert: str, labels: Mapping[str, str]) -> str:
    """Returns the lines that the command in an alert's text finds in the operator's log."""
    (rule,) = (rule for rule in alerts() if rule["alert"] == alert)
    (command,) = re.findall(r"`kubectl logs [^`|]*\| (grep [^`]*)`", rule["annotations"]["description"])
    for name, value in labels.items():
        command = command.replace(f"{{{{ $labels.{name} }}}}", value)
    lines = "".join(json.dumps(entry, default=str) + "\n" for entry in told)
    return subprocess.run(command, shell=True, input=lines, capture_output=True, text=True, check=False).stdout


async def test_the_log_says_why_redis_is_down_as_the_alert_promises() -> None:
    with capture_logs() as told:
        tenants = Tenants(f"redis://127.0.0.1:{free_port()}/0", "system/emberscale-operator")
        await tenants.look()
        await tenants.close()
    assert "Connect call failed" in found_in(told, "EmberscaleRedisDown", {})


@pytest.mark.parametrize(("status", "resource"), [(403, "pods"), (500, "pods/resize"), (500, "trainingjobs/status")])
async def test_the_log_says_why_calls_are_refused_as_the_alert_promises(
    status: int, resource: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = f'"x" is forbidden: User "u" cannot patch resource "{resource}"' if status == 403 else "webhook: no route"
    kind, _, part = resource.partition("/")

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response({"message": why}, status=status)

    async with api_server(handler, tmp_path, monkeypatch):
        client = await ApiClient.connect()
        with capture_logs() as told:
            for _ in range(3):
                with pytest.raises((ApiError, ApiUnavailableError)):
                    await client.patch(f"/api/v1/namespaces/team/{kind}/x/{part}".rstrip("/"), {})
        await client.close()
    found = found_in(told, "EmberscaleApiCallsRefused", {"verb": "PATCH", "resource": resource})
    assert json.dumps(why)[1:-1] in found
    assert len(found.splitlines()) == 1, "a log that says it each time says nothing else"
