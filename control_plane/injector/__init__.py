"""Injects the sidecar into pods: in the admission webhook, and in manifest files.

workloads     what to warn of when a Deployment or another workload is created
manifests     YAML and JSON files: inject the sidecar, and take it out again
admission     an AdmissionReview -> its response; a pod -> the pod with a sidecar, and the patch
pod_patch     a plan -> the changed pod
plan          decides everything about one pod's sidecar, or why the pod is not injected
server        which container is vLLM, its role and its port
traffic       how traffic reaches the sidecar: the modes, and which Services bypass it
envoy_config  the sidecar's Envoy configuration, as one argument of its container
compact_yaml  YAML in as few bytes as possible, for that argument
pod           a pod as the injector reads it
commands      recognises vLLM servers by their command lines
annotations   the labels and annotations of the API, and the request that they make
settings      how the injector is set up, for all pods alike
resources     Kubernetes' quantities and resource requirements
reasons       why a pod is not injected, and what an injection warns of
json_patch    JSON Patch (RFC 6902)
"""
