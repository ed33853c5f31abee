"""What the models of a policy are made of: the types of their values, and their base."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from control_plane.vllm import INT64_MAX, INT64_MIN

Int64 = Annotated[int, Field(strict=True, ge=INT64_MIN, le=INT64_MAX)]

HeaderName = Annotated[
    str,
    BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
    StringConstraints(pattern=r"^[a-z0-9!#$%&'*+.^_`|~-]+$", max_length=128),
]

# A class name must never be mistaken for a number, so it starts with a letter.
ClassName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9._-]{0,62}$")]

RoutePath = Annotated[str, StringConstraints(pattern=r"^/[^?#%\s]*$", max_length=1024)]

PolicyName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]


class PolicyModel(BaseModel):
    """Base of the models: frozen, and strict about types and keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Range(PolicyModel):
    """A range of valid priorities, bounds included."""

    min: Int64 | None = Field(default=None, description="Smallest valid priority. null: no bound.")
    max: Int64 | None = Field(default=None, description="Largest valid priority. null: no bound.")
    outside: Literal["reject", "clamp"] = Field(
        default="reject",
        description="What happens to a priority outside the range. reject: 400, or as on_invalid says; clamp: the "
        "nearest bound replaces it.",
    )

    def contains(self, value: int) -> bool:
        """Whether `value` lies within the bounds."""
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)
