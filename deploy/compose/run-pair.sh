#!/bin/sh
# vLLM's scale-out pair and its sidecars on one machine, without containers. Ctrl-C ends them all.
#
#   MODEL=Qwen/Qwen3-0.6B BIND=127.0.0.1 POLICY=policy.yaml ENGINE_ARGS="--max-model-len 4096" run-pair.sh
#
# Needs `vllm` and `vllm-priority` on the PATH. Clients use BIND:18000 (render) and BIND:18001 (engine).
set -eu

MODEL=${MODEL:-Qwen/Qwen3-0.6B}
BIND=${BIND:-127.0.0.1}
pids=""

for program in vllm vllm-priority; do
    command -v "$program" >/dev/null || { echo "run-pair: $program is not on the PATH" >&2; exit 2; }
done

stop() {
    trap - EXIT INT TERM
    # shellcheck disable=SC2086
    kill $pids 2>/dev/null || true
    wait
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

start() {
    "$@" &
    pids="$pids $!"
}

start vllm launch render "$MODEL" --host 127.0.0.1 --port 8000
# Without --enable-scale-out the routes answer 403; under the default policy, fcfs, a priority is passed over.
# shellcheck disable=SC2086
start vllm serve "$MODEL" --host 127.0.0.1 --port 8001 --enable-scale-out --scheduling-policy priority ${ENGINE_ARGS:-}
# vLLM ends together with its sidecar, so a sidecar that went on accepting would answer with errors.
start vllm-priority run --role render --upstream 127.0.0.1:8000 --listen "$BIND:18000" --drain-accept-seconds 0 ${POLICY:+--policy "$POLICY"}
start vllm-priority run --role engine --upstream 127.0.0.1:8001 --listen "$BIND:18001" --drain-accept-seconds 0 ${POLICY:+--policy "$POLICY"}

# One that ends takes the others with it: half a pair would look alive.
while sleep 1; do
    for pid in $pids; do
        kill -0 "$pid" 2>/dev/null || { echo "run-pair: one of the four has ended; the others are stopped" >&2; exit 1; }
    done
done
