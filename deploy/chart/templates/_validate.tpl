{{/* Values that are fine alone and contradict each other: each fails with a sentence. Types are values.schema.json's. */}}
{{- define "vllm-priority.validate" -}}
{{- $certificates := .Values.certificates -}}
{{- if eq $certificates.source "secret" -}}
  {{- if not (and $certificates.secretName $certificates.caBundle) -}}
    {{- fail "certificates.source is secret, so certificates.secretName and certificates.caBundle must say which Secret holds the certificate and which CA signed it." -}}
  {{- end -}}
{{- else if or $certificates.secretName $certificates.caBundle -}}
  {{- fail (printf "certificates.secretName and certificates.caBundle are for certificates.source: secret, but the source is %s: set the source, or leave both out." $certificates.source) -}}
{{- end -}}
{{- if eq $certificates.source "cert-manager" -}}
  {{- if not (.Capabilities.APIVersions.Has "cert-manager.io/v1") -}}
    {{- fail "certificates.source is cert-manager, but the cluster has no cert-manager.io/v1: install cert-manager first, or leave the source at chart (for helm template, add --api-versions cert-manager.io/v1)." -}}
  {{- end -}}
{{- else if $certificates.issuer.name -}}
  {{- fail (printf "certificates.issuer is for certificates.source: cert-manager, but the source is %s: set the source, or leave the issuer out." $certificates.source) -}}
{{- end -}}
{{- if and (not .Values.webhook.enabled) (ne $certificates.source "chart") -}}
  {{- fail (printf "certificates.source is %s, but webhook.enabled is false, and nothing else uses a certificate: leave one of them out." $certificates.source) -}}
{{- end -}}
{{- if and (not .Values.webhook.enabled) .Values.webhook.url -}}
  {{- fail "webhook.url is set, but webhook.enabled is false: leave one of them out." -}}
{{- end -}}
{{- if and .Values.policyConfigMap (or .Values.policy .Values.policies) -}}
  {{- fail "policyConfigMap names a ConfigMap of your own, so policy and policies would be passed over: leave those out, or policyConfigMap." -}}
{{- end -}}
{{- if and .Values.readServicesNamespaces (not .Values.readServices) -}}
  {{- fail "readServicesNamespaces is set, but readServices is false: set it to true, or leave the namespaces out." -}}
{{- end -}}
{{- if and .Values.readServices (eq (include "vllm-priority.serviceAccount" .) "default") -}}
  {{- fail "readServices would let every pod of the namespace read Services, because the service account is default: set serviceAccount.create to true, or serviceAccount.name." -}}
{{- end -}}
{{- if and (eq .Values.sidecar.numericServices "redirect") (not .Values.readServices) -}}
  {{- fail "sidecar.numericServices is redirect, but without readServices the control plane cannot see what a Service targets: set readServices to true, or leave numericServices at warn." -}}
{{- end -}}
{{- if and (eq .Values.sidecar.numericServices "redirect") (not .Values.sidecar.runAsUser) -}}
  {{- fail "sidecar.numericServices is redirect, but sidecar.runAsUser is null, and a redirect exempts the sidecar by its user: set one, or leave numericServices at warn." -}}
{{- end -}}
{{- if hasKey .Values.podLabels "vllm-priority.io/inject" -}}
  {{- fail "podLabels has vllm-priority.io/inject: the control plane would wait for itself to start. Leave that label out." -}}
{{- end -}}
{{- end -}}
