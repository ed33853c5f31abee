"""The settings of `serve`: contradictions are found where the settings are made, and named by their field."""

from pathlib import Path
from typing import Any

import pytest

from control_plane.address import Address
from control_plane.errors import InvalidField
from control_plane.injector.settings import InjectorSettings
from control_plane.server.settings import ServeSettings


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"tls_cert": Path("tls.crt")}, "tls_key"),
        ({"tls_key": Path("tls.key")}, "tls_cert"),
        ({"tls_listen": Address("127.0.0.1", 8443)}, "tls_listen"),
        ({"injector": InjectorSettings(numeric_services="redirect")}, "numeric_services"),
    ],
)
def test_a_contradiction_is_rejected_with_the_name_of_the_field(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as error:
        ServeSettings(Path("policy.yaml"), **settings)
    assert error.value.field == field
    assert str(error.value) == f"{field}: {error.value.problem}"
    assert "--" not in str(error.value), "only the command line knows how an option is spelled"
