{{/* What all pods have. */}}

{{/* Argument: the root. */}}
{{- define "specdec.podBasics" -}}
enableServiceLinks: false
securityContext: {{- include "specdec.podSecurity" . | nindent 2 }}
{{- with concat .Values.imagePullSecrets (.Values.global.imagePullSecrets | default list) }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- end -}}

{{/* What pods have that run once beside a role, where it runs. Argument: {root, name}. */}}
{{- define "specdec.oncePod" -}}
{{- $values := index .root.Values .name -}}
restartPolicy: Never
{{ include "specdec.podBasics" .root }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Containers that run before a service's, those without a securityContext with the service's. Argument: {root, name}. */}}
{{- define "specdec.initContainers" -}}
{{- $values := index .root.Values .name -}}
{{- $containers := list -}}
{{- if dig "fetch" "enabled" false ($values.model | default dict) -}}
{{- $containers = append $containers (include "specdec.fetchContainer" . | fromYaml) -}}
{{- end -}}
{{- range $values.initContainers -}}
{{- $security := include "specdec.containerSecurity" $ | fromYaml -}}
{{- $containers = append $containers (ternary . (set (deepCopy .) "securityContext" $security) (hasKey . "securityContext")) -}}
{{- end -}}
{{- with $containers -}}
{{ toYaml . }}
{{- end -}}
{{- end -}}

{{/* Claims of a role's devices, as a YAML list. Argument: {root, name}. */}}
{{- define "specdec.resourceClaims" -}}
{{- if has .name (list "target" "draft") -}}
{{- $claims := (index .root.Values .name).resourceClaims -}}
{{- if .root.Values.gpuClaim.enabled -}}
{{- $shared := dict "name" "gpu" "resourceClaimName" (include "specdec.gpuClaimName" .root) -}}
{{- $claims = prepend $claims $shared -}}
{{- end -}}
{{- with $claims -}}
{{ toYaml . }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Name of the shared claim. A claim cannot be changed: other devices are another claim, to which the pods are rolled. */}}
{{- define "specdec.gpuClaimName" -}}
{{ include "specdec.fullname" . }}-gpu-{{ include "specdec.gpuClaimSpec" . | sha256sum | trunc 8 }}
{{- end -}}
