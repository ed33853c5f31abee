{{- define "vllm-priority.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "vllm-priority.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: control-plane
{{- end -}}

{{- define "vllm-priority.labels" -}}
{{ include "vllm-priority.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "vllm-priority.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "vllm-priority.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "vllm-priority.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "vllm-priority.policyConfigMap" -}}
{{- .Values.policyConfigMap | default (printf "%s-policy" (include "vllm-priority.fullname" .)) -}}
{{- end -}}

{{- define "vllm-priority.podSecurityContext" -}}
runAsNonRoot: true
{{- with .Values.runAsUser }}
runAsUser: {{ int64 . }}
runAsGroup: {{ int64 . }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "vllm-priority.securityContext" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* The audience of the tokens that sidecars present. Another installation in the cluster does not accept them. */}}
{{- define "vllm-priority.tokenAudience" -}}
{{ include "vllm-priority.fullname" . }}.{{ .Release.Namespace }}
{{- end -}}

{{/* The options of the injector. Sidecars get their policy from the chart's Service. */}}
{{- define "vllm-priority.injectorArguments" -}}
- --control-plane=https://{{ include "vllm-priority.fullname" . }}.{{ .Release.Namespace }}.svc:443
- --control-plane-ca=/etc/vllm-priority-tls/ca.crt
{{- if .Values.sidecar.tokens }}
- --token-audience={{ include "vllm-priority.tokenAudience" . }}
{{- end }}
- --own-namespace={{ .Release.Namespace }}
- --kubernetes-version={{ .Capabilities.KubeVersion.Version }}
{{- with .Values.sidecar }}
{{- with .image }}
- --sidecar-image={{ . }}
{{- end }}
{{- with .redirectImage }}
- --redirect-image={{ . }}
{{- end }}
{{- with .resources }}
- {{ printf "--sidecar-resources=%s" (toJson .) | quote }}
{{- end }}
- --sidecar-concurrency={{ .concurrency }}
- --sidecar-uid={{ if .runAsUser }}{{ int64 .runAsUser }}{{ else }}none{{ end }}
- --native={{ .native }}
{{- range .forbiddenAnnotations }}
- --forbid-annotation={{ . }}
{{- end }}
- --drain-seconds={{ .drainSeconds }}
- --log-requests={{ .logRequests }}
{{- with .otlpEndpoint }}
- --otlp-endpoint={{ . }}
- --trace-percent={{ $.Values.sidecar.tracePercent }}
{{- end }}
- {{ printf "--sidecar-listen-host=%s" .listenHost | quote }}
- --on-injection-failure={{ .onInjectionFailure }}
{{- end }}
{{- if and .Values.webhook.enabled .Values.writeEvents }}
- --write-events
{{- end }}
{{- if .Values.readServices }}
- --read-services
- --numeric-services={{ .Values.sidecar.numericServices }}
{{- end }}
{{- end -}}

{{/* "true" if the control plane uses the Kubernetes API, otherwise empty. */}}
{{- define "vllm-priority.usesApi" -}}
{{- if or .Values.readServices .Values.sidecar.tokens (and .Values.webhook.enabled .Values.writeEvents) -}}
true
{{- end -}}
{{- end -}}
