{{/* Volumes of models and caches, and what fills them. */}}

{{/* The source of the volume that holds a component's model; empty for other sources. Argument: {root, values}. */}}
{{- define "specdec.modelVolume" -}}
{{- $source := .values.model.source -}}
{{- if hasPrefix "pvc://" $source -}}
persistentVolumeClaim: {claimName: {{ regexSplit "/" (trimPrefix "pvc://" $source) 2 | first }}, readOnly: true}
{{- else if hasPrefix "oci://" $source -}}
image: {reference: {{ regexSplit "#" (trimPrefix "oci://" $source) 2 | first | quote }}, pullPolicy: {{ .values.image.pullPolicy }}}
{{- end -}}
{{- end -}}

{{/* Name of the claim of a role's cache; empty: no claim. Argument: {root, name}. */}}
{{- define "specdec.cacheClaim" -}}
{{- $cache := (index .root.Values .name).cache -}}
{{- if $cache.existingClaim -}}
{{ $cache.existingClaim }}
{{- else if eq $cache.type "claim" -}}
{{ include "specdec.fullname" .root }}-{{ .name }}-cache
{{- end -}}
{{- end -}}

{{/* The specification of a claim. Argument: {cache, accessModes}. */}}
{{- define "specdec.claimSpec" -}}
accessModes: {{ toJson .accessModes }}
{{- with .cache.storageClassName }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .cache.sizeLimit }}}}
{{- end -}}

{{/* The source of the volume of a role's cache. Argument: {root, name}. */}}
{{- define "specdec.cacheVolume" -}}
{{- $cache := (index .root.Values .name).cache -}}
{{- with include "specdec.cacheClaim" . -}}
persistentVolumeClaim: {claimName: {{ . }}}
{{- else -}}
{{- if eq $cache.type "ephemeral" -}}
ephemeral:
  volumeClaimTemplate:
    metadata:
      labels: {{- include "specdec.podLabels" . | nindent 8 }}
    spec: {{- include "specdec.claimSpec" (dict "cache" $cache "accessModes" (list "ReadWriteOnce")) | nindent 6 }}
{{- else -}}
emptyDir: {sizeLimit: {{ $cache.sizeLimit }}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The container that downloads a role's model into its cache. Argument: {root, name}. */}}
{{- define "specdec.fetchContainer" -}}
{{- $values := index .root.Values .name -}}
{{- $id := trimPrefix "hf://" $values.model.source | splitList "@" -}}
name: fetch
image: {{ include "specdec.image" (dict "root" .root "image" $values.image) | quote }}
imagePullPolicy: {{ $values.image.pullPolicy }}
command: [specdec, fetch]
args:
  - {{ first $id | quote }}
  {{- if gt (len $id) 1 }}
  - {{ printf "--revision=%s" (last $id) | quote }}
  {{- end }}
  - --timeout-s={{ $values.model.fetch.timeoutSeconds }}
{{- $own := include "specdec.cacheEnvironment" $values | fromYamlArray }}
env: {{- include "specdec.withExtraEnv" (dict "own" $own "extra" $values.extraEnv) | nindent 2 }}
{{- with $values.extraEnvFrom }}
envFrom: {{- toYaml . | nindent 2 }}
{{- end }}
resources: {{- toYaml $values.model.fetch.resources | nindent 2 }}
securityContext: {{- include "specdec.containerSecurity" . | nindent 2 }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: cache, mountPath: /var/cache/specdec}
{{- $volumes := list "tmp" "cache" }}
{{- range $values.extraVolumes }}
{{- $volumes = append $volumes .name }}
{{- end }}
{{- range $values.extraVolumeMounts }}
{{- if has .name $volumes }}
  - {{- toYaml . | nindent 4 }}
{{- end }}
{{- end }}
{{- end -}}
