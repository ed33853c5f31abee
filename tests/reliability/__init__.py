"""Commands that run for minutes: `make soak`, and `make chaos`, whose figures docs/reliability.md shows."""
