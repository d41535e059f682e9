{{/* What services are told of Redis, and the bundled one's names. */}}

{{- define "specdec.redisName" -}}
{{ include "specdec.fullname" . }}-redis
{{- end -}}

{{- define "specdec.redisSecretName" -}}
{{ .Values.redis.bundled.existingSecret | default (include "specdec.redisName" .) }}
{{- end -}}

{{/* First part of all keys. Releases that share an external Redis must not share it. */}}
{{- define "specdec.redisKeyPrefix" -}}
{{- if .Values.redis.keyPrefix -}}
{{ .Values.redis.keyPrefix }}
{{- else if eq .Values.redis.mode "external" -}}
{{ include "specdec.shortened" (dict "name" (printf "%s-%s" .Release.Namespace (include "specdec.fullname" .)) "max" 64) }}
{{- else -}}
specdec
{{- end -}}
{{- end -}}

{{/* The secret with Redis' authorities and, for services, their certificate; empty: no such files. */}}
{{- define "specdec.redisTlsSecretName" -}}
{{- $redis := .Values.redis -}}
{{- if eq $redis.mode "external" -}}
{{ $redis.external.tls.existingSecret }}
{{- else if and (eq $redis.mode "bundled") .Values.tls.enabled -}}
{{ include "specdec.tlsSecretName" (dict "root" . "name" "redis") }}
{{- end -}}
{{- end -}}

{{/* Flags of a service. Argument: {root, port}. */}}
{{- define "specdec.redisArgs" -}}
{{- $redis := .root.Values.redis -}}
{{- if ne $redis.mode "none" -}}
{{- if eq $redis.mode "bundled" }}
- --redis-url={{ ternary "rediss" "redis" .root.Values.tls.enabled }}://{{ include "specdec.redisName" .root }}:6379/0
{{- else if $redis.external.url }}
- {{ printf "--redis-url=%s" $redis.external.url | quote }}
{{- end }}
- --redis-key-prefix={{ include "specdec.redisKeyPrefix" .root }}
- --redis-timeout-s={{ $redis.timeoutSeconds }}
- --registry-ttl-s={{ $redis.registryTtlSeconds }}
- --advertise-address={{ ternary "[$(POD_IP)]" "$(POD_IP)" (eq .root.Values.ipFamily "IPv6") }}:{{ .port }}
{{- if include "specdec.redisTlsSecretName" .root }}
- --redis-tls-ca-file=/etc/specdec/redis-tls/ca.crt
{{- if and (eq $redis.mode "external") $redis.external.tls.clientCertificate }}
- --redis-tls-cert-file=/etc/specdec/redis-tls/tls.crt
- --redis-tls-key-file=/etc/specdec/redis-tls/tls.key
{{- end }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Environment of a service: secrets, and the address that it registers. Argument: {root, name}. */}}
{{- define "specdec.redisEnv" -}}
{{- $redis := .root.Values.redis -}}
{{- $prefix := printf "SPECDEC_%s_REDIS_" (upper .name) -}}
{{- if ne $redis.mode "none" }}
- name: POD_IP
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
{{- end }}
{{- if eq $redis.mode "bundled" }}
- name: {{ $prefix }}PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ include "specdec.redisSecretName" .root }}, key: {{ .root.Values.redis.bundled.passwordKey }}}
{{- else if eq $redis.mode "external" }}
{{- $external := $redis.external }}
{{- $keys := dict "URL" $external.urlKey "USERNAME" $external.usernameKey "PASSWORD" $external.passwordKey
      "SENTINEL_USERNAME" $external.sentinelUsernameKey "SENTINEL_PASSWORD" $external.sentinelPasswordKey }}
{{- range $variable, $key := $keys }}
{{- if $key }}
- name: {{ $prefix }}{{ $variable }}
  valueFrom:
    secretKeyRef: {name: {{ $external.existingSecret }}, key: {{ $key }}}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What the schema cannot say. */}}
{{- define "specdec.checkRedis" -}}
{{- $external := .Values.redis.external -}}
{{- $processes := int (default 1 .Values.coordinator.settings.num_processes) -}}
{{- if and (gt $processes 1) (eq .Values.redis.mode "none") -}}
{{- fail "redis.mode bundled or external is needed: coordinator.settings.num_processes is above 1" -}}
{{- end -}}
{{- if eq .Values.redis.mode "external" -}}
{{- if not (or $external.url $external.urlKey) -}}
{{- fail "redis.external.url or redis.external.urlKey is needed: redis.mode is external" -}}
{{- end -}}
{{- if and $external.url $external.urlKey -}}
{{- fail "redis.external.url and redis.external.urlKey exclude each other" -}}
{{- end -}}
{{- range $name := list "urlKey" "usernameKey" "passwordKey" "sentinelUsernameKey" "sentinelPasswordKey" -}}
{{- if and (index $external $name) (not $external.existingSecret) -}}
{{- fail (printf "redis.external.existingSecret is needed: redis.external.%s is set" $name) -}}
{{- end -}}
{{- end -}}
{{- if and $external.tls.clientCertificate (not $external.tls.existingSecret) -}}
{{- fail "redis.external.tls.existingSecret is needed: redis.external.tls.clientCertificate is true" -}}
{{- end -}}
{{- if and $external.tls.existingSecret $external.url (not (hasPrefix "rediss" $external.url)) -}}
{{- fail "redis.external.url must begin with rediss: redis.external.tls.existingSecret is set" -}}
{{- end -}}
{{- end -}}
{{- end -}}
