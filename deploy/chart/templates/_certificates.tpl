{{- define "vllm-priority.certificateSecret" -}}
{{- .Values.certificates.secretName | default (printf "%s-tls" (include "vllm-priority.fullname" .)) -}}
{{- end -}}

{{/* The names in the certificate: those of the Service, and the host of webhook.url. */}}
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
The chart's own certificate, as JSON: ca, caKey, cert and key (PEM), names, renewAfter and caEnds (seconds since 1970).

The chart creates it once and reads it back from its Secret, until a name changes or the last tenth of its validity has
begun. The same CA, which is valid for twice as long, then signs the next certificate, so that running sidecars, which
trust this CA, go on polling. Only near the end of the CA there is a new one; it is trusted together with the previous
one. In `helm template` and in dry runs on the client, lookup finds nothing: each run creates a new certificate,
and the checksum in the pods' annotations rolls them out. All templates of one run must use the same certificate, and
templates can share a value only through .Values, so it is stored there at the end.
*/}}
{{- define "vllm-priority.certificate" -}}
{{- if not (hasKey .Values "madeCertificate") -}}
  {{- $names := include "vllm-priority.certificateNames" . -}}
  {{- $made := dict -}}
  {{- $days := int64 .Values.certificates.days -}}
  {{- $now := now | unixEpoch | int64 -}}
  {{- $ca := dict -}}
  {{- $caEnds := add $now (mul $days 172800) | toString -}}
  {{- $trusted := "" -}}
  {{- $olderCA := "" -}}
  {{- $secret := lookup "v1" "Secret" .Release.Namespace (include "vllm-priority.certificateSecret" .) -}}
  {{- if and $secret (hasKey ($secret.data | default dict) "tls.crt") (hasKey ($secret.data | default dict) "ca.crt") -}}
    {{- $notes := $secret.metadata.annotations | default dict -}}
    {{- $renewAfter := get $notes "vllm-priority.io/renew-after" -}}
    {{- if and (eq (get $notes "vllm-priority.io/names") $names) (lt $now ($renewAfter | default "0" | int64)) (hasKey $secret.data "ca.key") -}}
      {{- $made = dict "ca" (index $secret.data "ca.crt" | b64dec) "cert" (index $secret.data "tls.crt" | b64dec) "key" (index $secret.data "tls.key" | b64dec) "names" $names "renewAfter" $renewAfter "caKey" (index $secret.data "ca.key" | b64dec) "caEnds" (get $notes "vllm-priority.io/ca-ends") -}}
    {{- else if and (hasKey $secret.data "ca.key") (lt (add $now (mul $days 86400)) (get $notes "vllm-priority.io/ca-ends" | default "0" | int64)) -}}
      {{- $trusted = index $secret.data "ca.crt" | b64dec -}}
      {{- $ca = buildCustomCert ($trusted | regexFind "(?s)-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----" | b64enc) (index $secret.data "ca.key") -}}
      {{- $caEnds = get $notes "vllm-priority.io/ca-ends" -}}
    {{- else -}}
      {{- $olderCA = index $secret.data "ca.crt" | b64dec | regexFind "(?s)-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----" -}}
    {{- end -}}
  {{- end -}}
  {{- if not $made -}}
    {{- if not $ca -}}
      {{- $ca = genCAWithKey (printf "%s-ca" (include "vllm-priority.fullname" .)) (int (mul $days 2)) (genPrivateKey "ecdsa") -}}
      {{- $trusted = trim (printf "%s\n%s" (trim $ca.Cert) $olderCA) | printf "%s\n" -}}
    {{- end -}}
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
    {{- $renewAfter := add $now (mul $days 77760) | toString -}}
    {{- $made = dict "ca" $trusted "caKey" $ca.Key "caEnds" $caEnds "cert" $leaf.Cert "key" $leaf.Key "names" $names "renewAfter" $renewAfter -}}
  {{- end -}}
  {{- $_ := set .Values "madeCertificate" (toJson $made) -}}
{{- end -}}
{{- .Values.madeCertificate -}}
{{- end -}}

{{/* The CA that the API server must trust, in PEM. It is empty if cert-manager inserts it. */}}
{{- define "vllm-priority.caBundle" -}}
{{- if eq .Values.certificates.source "chart" -}}
{{- (include "vllm-priority.certificate" . | fromJson).ca -}}
{{- else if eq .Values.certificates.source "secret" -}}
{{- .Values.certificates.caBundle -}}
{{- end -}}
{{- end -}}
