{{/* Fail on values that contradict each other. values.schema.json checks their types. */}}
{{- define "vllm-priority.validate" -}}
{{- $certificates := .Values.certificates -}}
{{- if eq $certificates.source "secret" -}}
  {{- if not (and $certificates.secretName $certificates.caBundle) -}}
    {{- fail "certificates.source is secret, which needs the name of the Secret and the CA. Set certificates.secretName and certificates.caBundle." -}}
  {{- end -}}
{{- else if or $certificates.secretName $certificates.caBundle -}}
  {{- fail (printf "certificates.secretName and certificates.caBundle have an effect only with certificates.source: secret, but the source is %s. Set the source to secret, or remove both values." $certificates.source) -}}
{{- end -}}
{{- if eq $certificates.source "cert-manager" -}}
  {{- if not (.Capabilities.APIVersions.Has "cert-manager.io/v1") -}}
    {{- fail "certificates.source is cert-manager, but the cluster does not have cert-manager.io/v1. Install cert-manager first, or set the source to chart. With helm template, add --api-versions cert-manager.io/v1." -}}
  {{- end -}}
{{- else if $certificates.issuer.name -}}
  {{- fail (printf "certificates.issuer has an effect only with certificates.source: cert-manager, but the source is %s. Set the source to cert-manager, or remove the issuer." $certificates.source) -}}
{{- end -}}
{{- if and (not .Values.webhook.enabled) .Values.webhook.url -}}
  {{- fail "webhook.url is set, but webhook.enabled is false. Remove one of the two values." -}}
{{- end -}}
{{- if and .Values.policyConfigMap (or .Values.policy .Values.policies) -}}
  {{- fail "policyConfigMap is set, so policy and policies would be ignored. Remove them, or remove policyConfigMap." -}}
{{- end -}}
{{- if and .Values.readServicesNamespaces (not .Values.readServices) -}}
  {{- fail "readServicesNamespaces is set, but readServices is false. Set readServices to true, or remove the namespaces." -}}
{{- end -}}
{{- if and (include "vllm-priority.usesApi" .) (eq (include "vllm-priority.serviceAccount" .) "default") -}}
  {{- fail "With sidecar.tokens, writeEvents and readServices, every pod of the namespace would get the same permissions, because the service account is default. Set serviceAccount.create to true, set serviceAccount.name, or set all three to false." -}}
{{- end -}}
{{- if and (eq .Values.sidecar.numericServices "redirect") (not .Values.readServices) -}}
  {{- fail "sidecar.numericServices is redirect, but the control plane knows the ports of Services only with readServices. Set readServices to true, or set numericServices to warn." -}}
{{- end -}}
{{- if and (eq .Values.sidecar.numericServices "redirect") (not .Values.sidecar.runAsUser) -}}
  {{- fail "sidecar.numericServices is redirect, but sidecar.runAsUser is null, and the redirect needs the user id to exempt the sidecar's own traffic. Set runAsUser, or set numericServices to warn." -}}
{{- end -}}
{{- if hasKey .Values.podLabels "vllm-priority.io/inject" -}}
  {{- fail "podLabels has the label vllm-priority.io/inject, so the control plane would have to inject its own pods before it can start. Remove the label." -}}
{{- end -}}
{{- end -}}
