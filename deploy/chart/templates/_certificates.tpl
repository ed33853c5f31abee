{{- define "vllm-priority.certificateSecret" -}}
{{- .Values.certificates.secretName | default (printf "%s-tls" (include "vllm-priority.fullname" .)) -}}
{{- end -}}

{{/* The names that the certificate must carry: the Service's, and the host of webhook.url. */}}
{{- define "vllm-priority.certificateNames" -}}
{{- $service := printf "%s.%s.svc" (include "vllm-priority.fullname" .) .Release.Namespace -}}
{{- $names := list $service (printf "%s.cluster.local" $service) -}}
{{- with .Values.webhook.url -}}
  {{- $names = append $names (include "vllm-priority.urlHost" .) -}}
{{- end -}}
{{- join "," (uniq $names) -}}
{{- end -}}

{{- define "vllm-priority.urlHost" -}}
{{- (urlParse .).host | regexFind "^(\\[[^]]*\\]|[^:]*)" | trimAll "[]" -}}
{{- end -}}

{{/*
The chart's own certificate, as JSON: ca, cert and key (PEM), names, renewAfter (seconds since 1970).

It is made once and then read back from its Secret, until a name changes or its last tenth has begun. A CA that
follows another is trusted beside it, so that pods with the old certificate are believed until they have rolled.
lookup finds nothing in `helm template` and dry runs on the client: there it is a new one at every run, and the
checksum in the pods' annotations makes them roll. One run must use one certificate throughout, and a template
cannot hand a value to another but by the values: hence the set at the end.
*/}}
{{- define "vllm-priority.certificate" -}}
{{- if not (hasKey .Values "madeCertificate") -}}
  {{- $names := include "vllm-priority.certificateNames" . -}}
  {{- $made := dict -}}
  {{- $olderCA := "" -}}
  {{- $secret := lookup "v1" "Secret" .Release.Namespace (include "vllm-priority.certificateSecret" .) -}}
  {{- if and $secret (hasKey ($secret.data | default dict) "tls.crt") (hasKey ($secret.data | default dict) "ca.crt") -}}
    {{- $notes := $secret.metadata.annotations | default dict -}}
    {{- $renewAfter := get $notes "vllm-priority.io/renew-after" -}}
    {{- if and (eq (get $notes "vllm-priority.io/names") $names) (lt (now | unixEpoch | int64) ($renewAfter | default "0" | int64)) -}}
      {{- $made = dict "ca" (index $secret.data "ca.crt" | b64dec) "cert" (index $secret.data "tls.crt" | b64dec) "key" (index $secret.data "tls.key" | b64dec) "names" $names "renewAfter" $renewAfter -}}
    {{- else -}}
      {{- $olderCA = index $secret.data "ca.crt" | b64dec | regexFind "(?s)-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----" -}}
    {{- end -}}
  {{- end -}}
  {{- if not $made -}}
    {{- $days := int64 .Values.certificates.days -}}
    {{- $ca := genCAWithKey (printf "%s-ca" (include "vllm-priority.fullname" .)) (int $days) (genPrivateKey "ecdsa") -}}
    {{- $addresses := list -}}
    {{- $hosts := list -}}
    {{- range splitList "," $names -}}
      {{- if or (contains ":" .) (regexMatch "^[0-9.]+$" .) -}}
        {{- $addresses = append $addresses . -}}
      {{- else -}}
        {{- $hosts = append $hosts . -}}
      {{- end -}}
    {{- end -}}
    {{- $leaf := genSignedCertWithKey (index $hosts 0 | trunc 64) $addresses $hosts (int $days) $ca (genPrivateKey "ecdsa") -}}
    {{- $renewAfter := add (now | unixEpoch | int64) (mul $days 77760) | toString -}}
    {{- $trusted := trim (printf "%s\n%s" (trim $ca.Cert) $olderCA) -}}
    {{- $made = dict "ca" (printf "%s\n" $trusted) "cert" $leaf.Cert "key" $leaf.Key "names" $names "renewAfter" $renewAfter -}}
  {{- end -}}
  {{- $_ := set .Values "madeCertificate" (toJson $made) -}}
{{- end -}}
{{- .Values.madeCertificate -}}
{{- end -}}

{{/* PEM of what the API server is to trust; empty where cert-manager fills it in. */}}
{{- define "vllm-priority.caBundle" -}}
{{- if eq .Values.certificates.source "chart" -}}
{{- (include "vllm-priority.certificate" . | fromJson).ca -}}
{{- else if eq .Values.certificates.source "secret" -}}
{{- .Values.certificates.caBundle -}}
{{- end -}}
{{- end -}}
