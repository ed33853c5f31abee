"""Tests that run a pod's containers in a network namespace. They need root, iproute2, util-linux and nftables.

`make test` leaves this folder out, so that it passes on any machine. `make test-namespaces` runs it.
"""

from tests.integration.conftest import envoy as envoy  # the fixture with the Envoy under test
