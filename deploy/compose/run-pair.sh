#!/bin/sh
# vLLM's scale-out pair and its sidecars on one machine, without containers. Ctrl-C ends all four: the sidecars drain
# first, and then the servers are stopped. A second Ctrl-C ends the drain.
#
#   MODEL=Qwen/Qwen3-0.6B BIND=127.0.0.1 POLICY=policy.yaml ENGINE_ARGS="--max-model-len 4096" run-pair.sh
#
# Needs `vllm` and `vllm-priority` on the PATH. Clients use BIND:18000 (render) and BIND:18001 (engine).
set -eu

MODEL=${MODEL:-Qwen/Qwen3-0.6B}
BIND=${BIND:-127.0.0.1}
servers=""
sidecars=""

for program in vllm vllm-priority setsid; do
    command -v "$program" >/dev/null || { echo "run-pair: $program is not on the PATH" >&2; exit 2; }
done

# shellcheck disable=SC2086
stop() {
    # A signal interrupts `wait`, so each of the two is waited for until it has ended.
    trap 'kill $sidecars 2>/dev/null || true' INT TERM HUP
    trap - EXIT
    kill $sidecars 2>/dev/null || true
    for pid in $sidecars; do while kill -0 "$pid" 2>/dev/null; do wait "$pid" || true; done; done
    kill $servers 2>/dev/null || true
    for pid in $servers; do while kill -0 "$pid" 2>/dev/null; do wait "$pid" || true; done; done
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

# Each program runs in a session of its own, so that the terminal's Ctrl-C reaches this script alone.
# shellcheck disable=SC2086
start_server() {
    setsid "$@" &
    servers="$servers $!"
}

# shellcheck disable=SC2086
start_sidecar() {
    setsid vllm-priority run "$@" ${POLICY:+--policy "$POLICY"} &
    sidecars="$sidecars $!"
}

start_server vllm launch render "$MODEL" --host 127.0.0.1 --port 8000
# Without --enable-scale-out the routes answer 403; under the default policy, fcfs, vLLM ignores priorities.
# shellcheck disable=SC2086
start_server vllm serve "$MODEL" --host 127.0.0.1 --port 8001 --enable-scale-out --scheduling-policy priority ${ENGINE_ARGS:-}
start_sidecar --role render --upstream 127.0.0.1:8000 --listen "$BIND:18000"
start_sidecar --role engine --upstream 127.0.0.1:8001 --listen "$BIND:18001"

# If one of them ends, stop the others, too: half a pair would look alive.
while sleep 1; do
    for pid in $servers $sidecars; do
        kill -0 "$pid" 2>/dev/null || { echo "run-pair: one of the four has ended; the others are stopped" >&2; exit 1; }
    done
done
