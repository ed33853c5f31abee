{{- define "vllm-priority.namespaceSelector" -}}
{{- with .Values.webhook.namespaceLabels -}}
matchLabels:
  {{- toYaml . | nindent 2 }}
{{ end -}}
matchExpressions:
  - key: kubernetes.io/metadata.name
    operator: NotIn
    values:
      {{- range uniq (concat (list "kube-system" .Release.Namespace) .Values.webhook.excludedNamespaces) }}
      - {{ . }}
      {{- end }}
{{- end -}}

{{/* Where the API server finds a webhook. The arguments are the root context and the path. */}}
{{- define "vllm-priority.clientConfig" -}}
{{- $path := index . 1 -}}
{{- with index . 0 -}}
{{- with include "vllm-priority.caBundle" . -}}
caBundle: {{ b64enc . }}
{{ end -}}
{{- if .Values.webhook.url -}}
url: {{ printf "%s%s" (trimSuffix "/inject" .Values.webhook.url) $path | quote }}
{{- else -}}
service:
  name: {{ include "vllm-priority.fullname" . }}
  namespace: {{ .Release.Namespace }}
  path: {{ $path }}
  port: 443
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A CEL expression: whether a workload, or one of its pod templates, has the label. */}}
{{- define "vllm-priority.labelled" -}}
{{- $conditions := list -}}
{{- range list "metadata" "spec.template.metadata" "spec.jobTemplate.spec.template.metadata" "spec.leaderWorkerTemplate.leaderTemplate.metadata" "spec.leaderWorkerTemplate.workerTemplate.metadata" -}}
{{- $terms := list -}}
{{- $path := "object" -}}
{{- range append (splitList "." .) "labels" -}}
{{- $path = printf "%s.%s" $path . -}}
{{- $terms = append $terms (printf "has(%s)" $path) -}}
{{- end -}}
{{- $terms = append $terms (printf "'vllm-priority.io/inject' in %s" $path) -}}
{{- $terms = append $terms (printf "%s['vllm-priority.io/inject'] == 'true'" $path) -}}
{{- $conditions = append $conditions (join " && " $terms) -}}
{{- end -}}
{{- join " ||\n" $conditions -}}
{{- end -}}
