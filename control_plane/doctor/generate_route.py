"""The generate route: does it exist, and does a priority in the header arrive in its body?"""

import httpx

from control_plane.doctor.responses import error_param, error_text, status_and_error
from control_plane.doctor.server import ENABLE_SCALE_OUT, LOOK_AT_LOG, Server, StopExamination
from control_plane.vllm import GENERATE_ROUTE

SMALL_TOKENS = [1, 2, 3]
"""Token ids that every vocabulary has. Their meaning does not matter, because nobody reads what they generate."""


async def check_generate_route(server: Server) -> bool:
    """Add the rows about the generate route. Return whether requests can be generated.

    It sends two bodies that vLLM rejects, so nothing is generated.
    """
    try:
        response = await server.client.post(GENERATE_ROUTE, json={})
        status = response.status_code
        if status == 404:
            seen = f"POST {GENERATE_ROUTE} returned 404: a render-only server (vllm launch render) cannot generate."
            next_step = f"Use {server.spell('engine')} with the URL of an engine (vllm serve --enable-scale-out)."
            raise server.stop("scale-out", seen, next_step)
        if status == 403:
            if server.has_row("scale-out"):
                raise StopExamination
            seen = f"POST {GENERATE_ROUTE} returned {status_and_error(response)}."
            raise server.stop("scale-out", seen, ENABLE_SCALE_OUT, status=403)
        if status != 400:
            seen = f"POST {GENERATE_ROUTE} without members returned {status_and_error(response)}."
            raise server.stop("scale-out", seen, LOOK_AT_LOG, status=status)
        if not server.has_row("scale-out"):
            server.add("scale-out", "ok", "Scale-out is enabled: the engine can generate.", generate_status=400)
        await _check_header_reaches_body(server)
    except StopExamination:
        return False
    except httpx.HTTPError as error:
        server.add("scale-out", "unknown", f"A request failed: {server.reason(error)}.", LOOK_AT_LOG)
        return False
    return True


async def _check_header_reaches_body(server: Server) -> None:
    """Add the row that says whether the header replaces the body's priority.

    The body's own priority is not an integer and `sampling_params` is missing, so vLLM always rejects the body. If
    the header has replaced the priority, vLLM's error names only `sampling_params` and not `body.priority`.
    """
    content = {"model": server.model, "token_ids": SMALL_TOKENS, "priority": "not-a-number"}
    headers = {server.settings.header: str(server.priority)}
    response = await server.client.post(GENERATE_ROUTE, json=content, headers=headers)
    report, text = response.headers.get(server.settings.report_header), error_text(response)
    said = server.reported(report) or " No sidecar reported anything."
    evidence = {"status": response.status_code, "error": text, "applied": report}
    if response.status_code != 400 or "body." not in text:
        returned = f"POST {GENERATE_ROUTE} returned {status_and_error(response)}."
        if error_param(response) == server.settings.header.lower():
            server.add(GENERATE_ROUTE, "warn", returned, server.use_accepted_priority, **evidence)
        else:
            next_step = "See whether the order by the header, below, shows that the header counts."
            server.add(GENERATE_ROUTE, "unknown", f"{returned}{said}", next_step, **evidence)
    elif "body.priority" in text:
        seen = f"The header did not reach the body: vLLM still saw the body's own priority.{said}"
        next_step = server.advice_for_lost_header(report)
        server.add(GENERATE_ROUTE, "lost", seen, next_step, brief="not in the body", **evidence)
    else:
        seen = f"The header reached the body: vLLM no longer saw the body's own priority.{said}"
        server.add(GENERATE_ROUTE, "ok", seen, brief="in the body", **evidence)
