"""The metrics of the operator on the cluster, from its /metrics."""

from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

from cluster import kubectl
from faults import running
from installation import OPERATOR, SYSTEM

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
_READS = frozenset({"GET"})


def operator_samples() -> Samples:
    """Returns every sample, by name and labels."""
    pod = running(OPERATOR)["metadata"]["name"]
    text = kubectl("get", "--raw", f"/api/v1/namespaces/{SYSTEM}/pods/{pod}:9090/proxy/metrics")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(samples: Samples, name: str) -> float:
    """Returns the sum of a metric over all label values."""
    return sum(value for (found, _), value in samples.items() if found == name)


def writes(samples: Samples) -> Counter[str]:
    """Returns the numbers of writing calls by verb and resource, without those to the operator's own lease."""
    found: Counter[str] = Counter()
    for (name, labels), value in samples.items():
        named = dict(labels)
        if (
            name == "emberscale_operator_api_calls_total"
            and named["verb"] not in _READS
            and named["resource"] != "leases"
        ):
            found[f"{named['verb']} {named['resource']}"] += int(value)
    return found
