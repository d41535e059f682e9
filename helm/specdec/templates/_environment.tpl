{{/* Environment of a service's container. Argument: {root, name}. */}}
{{- define "specdec.environment" -}}
{{- $own := include "specdec.chartEnvironment" . | fromYamlArray }}
{{- include "specdec.withExtraEnv" (dict "own" $own "extra" (index .root.Values .name).extraEnv) }}
{{- end -}}

{{/* The chart's variables without those that extraEnv has, and extraEnv. Argument: {own, extra}. */}}
{{- define "specdec.withExtraEnv" -}}
{{- $own := list }}
{{- $names := list }}
{{- range .extra }}
{{- $names = append $names .name }}
{{- end }}
{{- range .own }}
{{- if not (has .name $names) }}
{{- $own = append $own . }}
{{- end }}
{{- end }}
{{- concat $own .extra | toYaml }}
{{- end -}}

{{- define "specdec.chartEnvironment" -}}
{{- $root := .root }}
{{- $values := index $root.Values .name }}
{{- if eq .name "gateway" }}
- {name: HOME, value: /tmp}
{{- else }}
{{ include "specdec.homeEnvironment" . }}
{{- end }}
# `kubectl exec POD -- specdec health` reads it.
- {name: SPECDEC_HEALTH_ADDRESS, value: "{{ if eq .name "gateway" }}http://{{ end }}127.0.0.1:8081"}
{{- if eq .name "coordinator" }}
- name: SPECDEC_COORDINATOR_RESUME_SECRET
  valueFrom:
    secretKeyRef: {name: {{ include "specdec.resumeSecretName" $root | quote }}, key: {{ $root.Values.resumeSecret.key | quote }}}
{{- else if ne .name "gateway" }}
{{ include "specdec.hubEnvironment" $values }}
- {name: TRITON_CACHE_DIR, value: /var/cache/specdec/triton}
- {name: TORCHINDUCTOR_CACHE_DIR, value: /var/cache/specdec/inductor}
{{- end }}
{{- with include "specdec.redisEnv" . | trim }}
{{ . }}
{{- end }}
{{- with $root.Values.tracing }}
{{- if and .endpoint .headersSecret }}
- name: SPECDEC_{{ upper $.name }}_OTLP_HEADERS
  valueFrom:
    secretKeyRef: {{- toYaml .headersSecret | nindent 6 }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "specdec.homeEnvironment" -}}
- {name: HOME, value: /var/cache/specdec}
- {name: XDG_CACHE_HOME, value: /var/cache/specdec}
{{- end -}}

{{/* Where downloads are kept, the hub's token, and a store's place and keys. Argument: the role's values. */}}
{{- define "specdec.hubEnvironment" -}}
- {name: HF_HOME, value: /var/cache/specdec/huggingface}
{{- with .model.tokenSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {{- toYaml . | nindent 6 }}
{{- end }}
{{- if hasPrefix "s3://" .model.source }}
{{- with .model.s3.endpoint }}
- {name: AWS_ENDPOINT_URL, value: {{ . | quote }}}
{{- end }}
{{- with .model.s3.region }}
- {name: AWS_DEFAULT_REGION, value: {{ . | quote }}}
{{- end }}
{{- with .model.s3.existingSecret }}
{{- $secret := . }}
{{- range $key := list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" "AWS_SESSION_TOKEN" }}
- name: {{ $key }}
  valueFrom:
    secretKeyRef: {name: {{ $secret }}, key: {{ $key }}, optional: {{ eq $key "AWS_SESSION_TOKEN" }}}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "specdec.cacheEnvironment" -}}
{{ include "specdec.homeEnvironment" . }}
{{ include "specdec.hubEnvironment" . }}
{{- end -}}
