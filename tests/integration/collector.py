"""A collector of traces: a gRPC server that speaks OTLP by OpenTelemetry's own protocol files."""

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1 import trace_pb2

from control_plane.address import Address


class Span:
    """A span: its ids as in traceparent, the service that sent it, and its attributes as texts."""

    def __init__(self, service: str, span: trace_pb2.Span) -> None:
        self.service = service
        self.trace_id: str = span.trace_id.hex()
        self.span_id: str = span.span_id.hex()
        self.parent_id: str = span.parent_span_id.hex()
        self.attributes: dict[str, str] = {pair.key: pair.value.string_value for pair in span.attributes}


class Collector:
    """Keeps the spans that it gets."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._spans: list[Span] = []

    def export(self, request: ExportTraceServiceRequest, _: object) -> ExportTraceServiceResponse:
        """Take the spans of one export."""
        with self._changed:
            for resource in request.resource_spans:
                service = next(
                    pair.value.string_value for pair in resource.resource.attributes if pair.key == "service.name"
                )
                self._spans += [Span(service, span) for scope in resource.scope_spans for span in scope.spans]
            self._changed.notify_all()
        return ExportTraceServiceResponse()

    def wait_for(self, number: int, seconds: float = 20) -> list[Span]:
        """Return all spans, once there are as many. Envoy sends them every five seconds."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._spans) >= number, seconds), f"{len(self._spans)} spans"
            return list(self._spans)


@contextmanager
def collecting() -> Iterator[tuple[Collector, Address]]:
    """A running collector, and its address."""
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    export = grpc.unary_unary_rpc_method_handler(
        collector.export, ExportTraceServiceRequest.FromString, ExportTraceServiceResponse.SerializeToString
    )
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {"Export": export})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, Address("127.0.0.1", port)
    finally:
        server.stop(None).wait()
