"""The rules of the CustomResourceDefinition that span fields, in CEL.

Each rule is listed under the type whose Python validator enforces the same rule. Its message names the field and says
what to do.
"""

from collections.abc import Mapping

from emberscale_api.job.continuity import Keeper, fixed_fields
from emberscale_api.job.roles import LEAST_MEMORY, UNITS_OF_MEMORY
from emberscale_api.job.run_policy import LEAST_WRITE_BANDWIDTH
from emberscale_api.job.training_job import NAME_PATTERN, NAME_RULE
from emberscale_api.job.units import MOST_QUANTITY


def _within(name: str) -> dict[str, str]:
    request, limit = f"self.requests.{name}", f"self.limits.{name}"
    return {
        "rule": f"!has(self.requests) || !has(self.limits) || !has({request}) || !has({limit}) || "
        f"!quantity(string({request})).isGreaterThan(quantity(string({limit})))",
        "message": f"requests.{name} must not be above limits.{name}",
    }


def _milliseconds(name: str) -> str:
    return f"(type(self.{name}) == int ? int(self.{name}) * 1000 : duration(string(self.{name})).getMilliseconds())"


_ADVICE = {
    "spec.checkpoint.uri": "the job resumes from the checkpoints at this URI",
    "spec.checkpoint.initialFrom": "the job has already started from it",
}
_ANEW = "delete the TrainingJob and create one with another name"


def _fixed(path: str, field: str, optional: bool) -> dict[str, str]:
    """A rule of the section that holds the field; an optional field may be absent from both objects."""
    same = f"self.{field} == oldSelf.{field}"
    return {
        "rule": f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || {same})" if optional else same,
        "message": f"{path} cannot change once the job is created: {_ADVICE.get(path, _ANEW)}",
    }


def _fixed_within(section: str, optional: bool = False) -> list[dict[str, str]]:
    """The rules of one section, `spec` or `spec.<name>`: the fields in it that a resource keeps."""
    kept = [path.rpartition(".") for path in fixed_fields(Keeper.RESOURCE)]
    return [_fixed(f"{parent}.{field}", field, optional) for parent, _, field in kept if parent == section]


def _at_least(field: str) -> str:
    """Whether a number of parameter servers is enough for the parity."""
    parity = "(has(self.faultTolerance.parity) ? self.faultTolerance.parity : 1)"
    return f"(has(self.ps.{field}) && self.ps.{field} > {parity})"


# The API server validates a section's default before it fills in the defaults of its fields, so each rule checks
# `has` first.
RULES: Mapping[str, list[dict[str, str]]] = {
    "TrainingJobSpec": [
        *_fixed_within("spec"),
        {
            "rule": "self.data.format != 'CriteoTSV' || !has(self.model.embeddings.tables) || "
            "self.model.embeddings.tables.all(name, name.matches('^C([1-9]|1[0-9]|2[0-6])$'))",
            "message": "model.embeddings.tables: no such categorical column; CriteoTSV has C1 to C26",
        },
        {
            "rule": "!has(self.faultTolerance) || !has(self.faultTolerance.strategy) || "
            "self.faultTolerance.strategy != 'ErasureCoding' || (has(self.ps) && "
            f"({_at_least('replicas')} || {_at_least('minReplicas')}))",
            "message": "faultTolerance.parity needs more parameter servers: set ps.replicas or ps.minReplicas to "
            "parity + 1 or more",
        },
        {
            "rule": "!has(self.data.continuation) || self.data.continuation == 'Fresh' || "
            "(has(self.checkpoint) && has(self.checkpoint.initialFrom))",
            "message": "data.continuation needs checkpoint.initialFrom, the checkpoint to start from",
        },
    ],
    "DataSpec": [
        {
            "rule": "self.format != 'CriteoTSV' || !has(self.columns)",
            "message": "columns must not be given for format CriteoTSV, whose columns are fixed",
        },
        {
            "rule": "self.format == 'CriteoTSV' || has(self.columns)",
            "message": "columns is required for the formats Parquet and CSV",
        },
    ],
    "CSVSpec": [
        {
            "rule": "!has(self.delimiter) || !has(self.listSeparator) || self.delimiter != self.listSeparator",
            "message": "delimiter and listSeparator must differ",
        }
    ],
    "ColumnMapping": [
        {
            "rule": "(has(self.categorical) && size(self.categorical) > 0) || "
            "(has(self.lists) && size(self.lists) > 0)",
            "message": "name at least one column in categorical or lists: without ids there is nothing to embed",
        },
        {
            "rule": "!has(self.denseTransforms) || (has(self.dense) && "
            "self.denseTransforms.all(name, name in self.dense))",
            "message": "denseTransforms names a column that is not in dense: add it there, or remove it here",
        },
    ],
    "RoleSpec": [
        {
            "rule": "!has(self.replicas) || (!has(self.minReplicas) && !has(self.maxReplicas))",
            "message": "give either replicas, or minReplicas and maxReplicas",
        },
        {
            "rule": "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            "message": "minReplicas must not be above maxReplicas",
        },
    ],
    "ResourceList": [
        {
            "rule": f"!has(self.memory) || !quantity(string(self.memory)).isLessThan(quantity('{LEAST_MEMORY}'))",
            "message": f"memory must be at least {LEAST_MEMORY}: {UNITS_OF_MEMORY}",
        },
    ],
    "ResourceRequirements": [_within("cpu"), _within("memory")],
    "ShardingSpec": [
        {
            "rule": "!has(self.minBatches) || !has(self.maxBatches) || self.minBatches <= self.maxBatches",
            "message": "minBatches must not be above maxBatches",
        },
        {
            "rule": "!has(self.leaseTimeout) || !has(self.heartbeatInterval) || "
            f"{_milliseconds('heartbeatInterval')} * 2 <= {_milliseconds('leaseTimeout')}",
            "message": "leaseTimeout must be at least twice heartbeatInterval",
        },
    ],
    "CheckpointSpec": [
        *_fixed_within("spec.checkpoint", optional=True),
        {
            "rule": "!has(self.writeBandwidth) || "
            f"!quantity(string(self.writeBandwidth)).isLessThan(quantity('{LEAST_WRITE_BANDWIDTH}'))",
            "message": f"writeBandwidth must be at least {LEAST_WRITE_BANDWIDTH}",
        },
        {
            "rule": "!has(self.uri) || !has(self.initialFrom) || self.uri != self.initialFrom.uri",
            "message": "initialFrom.uri must differ from uri: a job resumes from its own checkpoints without it",
        },
    ],
    "FaultToleranceSpec": [
        {
            "rule": "!has(self.priority) || self.priority == 'None' || "
            "(has(self.strategy) && self.strategy == 'PartialRecovery') || "
            "(has(self.targetPLS) && (!has(self.strategy) || self.strategy == 'Auto'))",
            "message": "priority is for partial recovery: choose strategy PartialRecovery, or Auto with a targetPLS",
        },
        {
            "rule": "!has(self.targetPLS) || !has(self.strategy) || "
            "!(self.strategy in ['FullRecovery', 'ErasureCoding'])",
            "message": "targetPLS: FullRecovery and ErasureCoding lose no sample; remove targetPLS, or choose "
            "PartialRecovery",
        },
        {
            "rule": "!has(self.durability) || self.durability == 'Sync' || !has(self.strategy) || "
            "self.strategy in ['Auto', 'ErasureCoding']",
            "message": "durability: FullRecovery and PartialRecovery keep no parity; remove durability, or choose "
            "ErasureCoding or Auto",
        },
    ],
    "OptimizersSpec": [
        {
            "rule": "!has(self.dense) || !has(self.dense.type) || !(self.dense.type in ['RowWiseAdagrad', 'FTRL'])",
            "message": "optimizers.dense.type: RowWiseAdagrad and FTRL are for embeddings; "
            "use SGD, Momentum, Adagrad or Adam",
        }
    ],
    "ModelSpec": [
        {
            "rule": "!has(self.architecture) || !has(self.entrypoint)",
            "message": "give either architecture, for a built-in model, or entrypoint, for a custom model",
        },
        {
            "rule": "has(self.entrypoint) || (has(self.architecture) && self.architecture in ['WideAndDeep', 'DCNv2']) "
            "|| !has(self.embeddings) || !has(self.embeddings.tables) || self.embeddings.tables.all(name, "
            "!has(self.embeddings.tables[name].dimension) || "
            "self.embeddings.tables[name].dimension == self.embeddings.dimension)",
            "message": "embeddings.tables: DLRM and XDeepFM multiply embeddings with each other: give all tables the "
            "same dimension, or use WideAndDeep or DCNv2",
        },
    ],
    "EnvironmentVariable": [
        {"rule": "!has(self.value) || !has(self.valueFrom)", "message": "give either value or valueFrom"},
        {
            "rule": "!self.name.startsWith('EMBERSCALE_')",
            "message": "names that start with EMBERSCALE_ are reserved for the operator",
        },
    ],
    "PodTemplate": [
        {
            "rule": "!has(self.volumes) || self.volumes.all(volume, !(volume.name in "
            "['emberscale-tmp', 'emberscale-job', 'emberscale-shm']))",
            "message": "volume names that start with emberscale- are reserved for the operator",
        },
        {
            "rule": "!has(self.volumeMounts) || self.volumeMounts.all(mount, mount.mountPath.startsWith('/'))",
            "message": "volumeMounts: mountPath must be absolute",
        },
        {
            "rule": "!has(self.volumeMounts) || self.volumeMounts.all(mount, "
            "has(self.volumes) && self.volumes.exists(volume, volume.name == mount.name))",
            "message": "volumeMounts: each must name one of the volumes of the same template",
        },
    ],
}
QUANTITY_RANGE = {
    "rule": "quantity(string(self)).isGreaterThan(quantity('0')) && "
    f"!quantity(string(self)).isGreaterThan(quantity('{MOST_QUANTITY}'))",
    "message": f"must be above 0 and at most {MOST_QUANTITY}",
}
NAME = {
    "rule": f"self.metadata.name.matches('^{NAME_PATTERN}$')",
    "message": f"metadata.name: {NAME_RULE}",
}
