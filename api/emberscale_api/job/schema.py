"""What every part of the manifest has in common."""

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class ManifestPart(BaseModel):
    """A frozen section of the manifest: camelCase in YAML, snake_case in Python, unknown fields refused."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        extra="forbid",
        frozen=True,
        use_enum_values=False,
    )
