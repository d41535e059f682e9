{{/* Environment of a service's container: what extraEnv has too is taken from there. Argument: {root, name}. */}}
{{- define "specdec.environment" -}}
{{- $own := list }}
{{- $names := list }}
{{- range (index .root.Values .name).extraEnv }}
{{- $names = append $names .name }}
{{- end }}
{{- range include "specdec.chartEnvironment" . | fromYamlArray }}
{{- if not (has .name $names) }}
{{- $own = append $own . }}
{{- end }}
{{- end }}
{{- concat $own (index .root.Values .name).extraEnv | toYaml }}
{{- end -}}

{{- define "specdec.chartEnvironment" -}}
{{- $root := .root }}
{{- $values := index $root.Values .name }}
- {name: HOME, value: /var/cache/specdec}
- {name: XDG_CACHE_HOME, value: /var/cache/specdec}
# For `kubectl exec POD -- specdec health`.
- {name: SPECDEC_HEALTH_ADDRESS, value: "127.0.0.1:8081"}
{{- if eq .name "coordinator" }}
- name: SPECDEC_COORDINATOR_RESUME_SECRET
  valueFrom:
    secretKeyRef: {name: {{ include "specdec.resumeSecretName" $root | quote }}, key: {{ $root.Values.resumeSecret.key | quote }}}
{{- else }}
- {name: HF_HOME, value: /var/cache/specdec/huggingface}
- {name: TRITON_CACHE_DIR, value: /var/cache/specdec/triton}
- {name: TORCHINDUCTOR_CACHE_DIR, value: /var/cache/specdec/inductor}
{{- with $values.model.tokenSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {{- toYaml . | nindent 6 }}
{{- end }}
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
