"""Contender (f): an external processor for Envoy's ext_proc filter, on grpcio.

python ext_proc_server.py PORT

Envoy sends the request's headers, then its whole body (BUFFERED); the answer carries the body edited by Python's json.
In this mode Envoy forwards the Content-Length that came in, so a body of another length needs a new one with it.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ext_proc_grpc

HEADER = "x-vllm-priority"


class Processor(ext_proc_grpc.ExternalProcessorServicer):
    async def Process(  # noqa: N802 (the name in the protocol)
        self, requests: AsyncIterator[ext_proc.ProcessingRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[ext_proc.ProcessingResponse]:
        priority = None
        async for request in requests:
            if request.HasField("request_headers"):
                for header in request.request_headers.headers.headers:
                    if header.key == HEADER:
                        priority = int(header.raw_value)
                removal = ext_proc.HeaderMutation(remove_headers=[HEADER])
                answer = ext_proc.HeadersResponse(response=ext_proc.CommonResponse(header_mutation=removal))
                yield ext_proc.ProcessingResponse(request_headers=answer)
            elif request.HasField("request_body"):
                answer = ext_proc.BodyResponse()
                if priority is not None:
                    document = json.loads(request.request_body.body)
                    document["priority"] = priority
                    body = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
                    answer.response.body_mutation.body = body
                    length = base_pb2.HeaderValue(key="content-length", raw_value=str(len(body)).encode())
                    answer.response.header_mutation.set_headers.append(
                        base_pb2.HeaderValueOption(
                            header=length, append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
                        )
                    )
                yield ext_proc.ProcessingResponse(request_body=answer)


async def serve(port: int) -> None:
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.aio.server(options=unlimited)
    ext_proc_grpc.add_ExternalProcessorServicer_to_server(Processor(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
