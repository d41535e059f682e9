{{/* Secrets that are given as values, exist, or are made once by a Job (secrets-job.yaml). No live object is looked up, so
     that two renders are equal. */}}

{{- define "specdec.generatedSecretName" -}}
{{ include "specdec.fullname" . }}-generated
{{- end -}}

{{/* Argument: {root, existing, value, name}. */}}
{{- define "specdec.secretNameOf" -}}
{{- if .existing -}}
{{ .existing }}
{{- else if .value -}}
{{ include "specdec.fullname" .root }}-{{ .name }}
{{- else -}}
{{ include "specdec.generatedSecretName" .root }}
{{- end -}}
{{- end -}}

{{- define "specdec.resumeSecretName" -}}
{{ include "specdec.secretNameOf" (dict "root" . "existing" .Values.resumeSecret.existingSecret "value" .Values.resumeSecret.value "name" "resume") }}
{{- end -}}

{{- define "specdec.redisSecretName" -}}
{{ include "specdec.secretNameOf" (dict "root" . "existing" .Values.redis.bundled.existingSecret "value" .Values.redis.bundled.password "name" "redis") }}
{{- end -}}

{{/* What the Job makes, as JSON: by key, the secret in which charts before 0.2 kept it. */}}
{{- define "specdec.generatedKeys" -}}
{{- $keys := dict -}}
{{- $fullname := include "specdec.fullname" . -}}
{{- $generated := include "specdec.generatedSecretName" . -}}
{{- if and .Values.target.enabled (eq (include "specdec.resumeSecretName" .) $generated) -}}
{{- $_ := set $keys .Values.resumeSecret.key (printf "%s-resume" $fullname) -}}
{{- end -}}
{{- if and (eq .Values.redis.mode "bundled") (eq (include "specdec.redisSecretName" .) $generated) -}}
{{- if hasKey $keys .Values.redis.bundled.passwordKey -}}
{{- fail "resumeSecret.key and redis.bundled.passwordKey must differ: one secret holds both" -}}
{{- end -}}
{{- $_ := set $keys .Values.redis.bundled.passwordKey (printf "%s-redis" $fullname) -}}
{{- end -}}
{{ toJson $keys }}
{{- end -}}
