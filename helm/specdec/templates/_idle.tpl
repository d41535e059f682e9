{{/* Models that are scaled to zero, and the gateways that hold their first requests. */}}

{{/* Not empty when autoscaling may end the role's last pod. Argument: {root, name}. */}}
{{- define "specdec.mayIdle" -}}
{{- with (index .root.Values .name).autoscaling -}}
{{- if and .enabled (eq (int .minReplicas) 0) }}true{{ end -}}
{{- end -}}
{{- end -}}

{{/* Number of requests for this model that gateways hold, as PromQL; empty: none does. Argument: the root. */}}
{{- define "specdec.heldQuery" -}}
{{- $held := "sum(specdec_gateway_requests_held{namespace=%q,service=%q,model=%q})" -}}
{{- if .Values.heldBy.service -}}
{{ printf $held (.Values.heldBy.namespace | default .Release.Namespace) .Values.heldBy.service .Values.heldBy.model }}
{{- else if and .Values.gateway.enabled (get .Values.gateway.settings "hold_s") -}}
{{ printf $held .Release.Namespace (include "specdec.headlessName" (dict "root" . "name" "gateway")) "" }}
{{- end -}}
{{- end -}}

{{/* Number of requests that are held or run, as PromQL. Gateways never idle: without their series the result is empty.
     Argument: the root. */}}
{{- define "specdec.requestsQuery" -}}
{{- $series := printf "{namespace=%q,service=%q}" .Release.Namespace (include "specdec.headlessName" (dict "root" . "name" "coordinator")) -}}
{{- $running := printf "sum(specdec_coordinator_requests_running%s)" $series -}}
{{- with include "specdec.heldQuery" . -}}
{{ . }} + ({{ $running }} or vector(0))
{{- else -}}
{{ $running }}
{{- end -}}
{{- end -}}
