"""The base of every part of the manifest."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic.alias_generators import to_camel


class ManifestPart(BaseModel):
    """A frozen section of the manifest: camelCase in YAML, snake_case in Python, unknown fields refused.

    A mapping that names some fields of a section keeps the defaults of all others, also where the section's default is
    not that of its type: `optimizers.sparse: {learningRate: 0.1}` changes the rate and nothing else. A reader that
    validates with `extra="allow"` keeps unknown fields, and they are written as they were read.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        extra="forbid",
        frozen=True,
        use_enum_values=False,
    )

    @model_serializer(mode="wrap")
    def _with_unknown_fields(self, known: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Writes unknown fields too, which a section that refuses them would drop."""
        return {**known(self), **(self.__pydantic_extra__ or {})}

    @model_validator(mode="before")
    @classmethod
    def _keep_other_defaults(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        completed = dict(given)
        for name, field in cls.model_fields.items():
            key = name if name in given else field.alias or name
            if isinstance(field.default, ManifestPart) and isinstance(given.get(key), Mapping):
                completed[key] = _completed(given[key], field.default)
        return completed


def own_default(part: ManifestPart) -> ManifestPart:
    """The default of a section of this type, unless the section around it has another default."""
    return type(part)()


def _completed(given: Mapping[str, Any], default: ManifestPart) -> dict[str, Any]:
    """The fields that are given, and those of the default that its type would not fill in by itself."""
    completed, own = dict(given), own_default(default)
    for name, field in type(default).model_fields.items():
        value, alias = getattr(default, name), field.alias or name
        if value == getattr(own, name):
            continue
        key = name if name in given else alias
        if key not in given:
            completed[key] = value
        elif isinstance(value, ManifestPart) and isinstance(given[key], Mapping):
            completed[key] = _completed(given[key], value)
    return completed
