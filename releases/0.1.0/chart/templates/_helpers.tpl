{{/* A name of at most `max` characters; one that is cut ends in a digest, so that two long names stay two. Argument: {name, max}. */}}
{{- define "specdec.shortened" -}}
{{- if gt (len .name) (int .max) -}}
{{ .name | trunc (sub (int .max) 9 | int) | trimSuffix "-" }}-{{ sha256sum .name | trunc 8 }}
{{- else -}}
{{ .name }}
{{- end -}}
{{- end -}}

{{/* Name of everything the release makes: a DNS label that begins with a letter, as Services must, which releases need not;
     at most 40 characters, so that suffixes fit. */}}
{{- define "specdec.fullname" -}}
{{- $name := .Values.fullnameOverride | default .Release.Name | replace "." "-" -}}
{{- if not (regexMatch "^[a-z]" $name) -}}
{{- $name = printf "specdec-%s" $name -}}
{{- else if not (or .Values.fullnameOverride (contains "specdec" $name)) -}}
{{- $name = printf "%s-specdec" $name -}}
{{- end -}}
{{ include "specdec.shortened" (dict "name" $name "max" 40) }}
{{- end -}}

{{/* Labels of selectors; they never change, selectors are immutable. Argument: {root, name}. */}}
{{- define "specdec.selectorLabels" -}}
app.kubernetes.io/name: specdec
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .name }}
{{- end -}}

{{/* Labels of objects. Pods have those of selectors alone: another version of the chart restarts only what it changes. */}}
{{- define "specdec.labels" -}}
{{ include "specdec.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | replace "+" "_" | trunc 63 | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | quote }}
{{- end -}}

{{/* The roles that are deployed, as a YAML list; fixed facts of the code are here and nowhere else. */}}
{{- define "specdec.roles" -}}
- {name: coordinator, port: 50051, metricsPort: 9090, grpcService: specdec.v1.CoordinatorService}
- {name: target, port: 50052, metricsPort: 9092, grpcService: specdec.v1.TargetService}
{{- if .Values.draft.enabled }}
- {name: draft, port: 50053, metricsPort: 9093, grpcService: specdec.v1.DraftService}
{{- end }}
{{- end -}}

{{- define "specdec.headlessName" -}}
{{ include "specdec.fullname" .root }}-{{ .name }}-headless
{{- end -}}

{{/* Coordinators are called through a load-balanced Service, replicas one by one through a headless one. */}}
{{- define "specdec.serviceName" -}}
{{- if eq .name "coordinator" -}}
{{ include "specdec.fullname" .root }}-coordinator
{{- else -}}
{{ include "specdec.headlessName" . }}
{{- end -}}
{{- end -}}

{{- define "specdec.serviceAccountName" -}}
{{- $account := (index .root.Values .name).serviceAccount -}}
{{- if $account.create -}}
{{ $account.name | default (printf "%s-%s" (include "specdec.fullname" .root) .name) }}
{{- else -}}
{{ $account.name | default "default" }}
{{- end -}}
{{- end -}}

{{- define "specdec.redisServiceAccountName" -}}
{{- $account := .Values.redis.bundled.serviceAccount -}}
{{- if $account.create -}}
{{ $account.name | default (include "specdec.redisName" .) }}
{{- else -}}
{{ $account.name | default "default" }}
{{- end -}}
{{- end -}}

{{- define "specdec.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default (.root.Chart.AppVersion | replace "+" "_") }}
{{- end -}}
{{- end -}}

{{- define "specdec.tlsSecretName" -}}
{{- if .root.Values.tls.certManager.enabled -}}
{{ include "specdec.fullname" .root }}-{{ .name }}-tls
{{- else -}}
{{ required (printf "tls.existingSecrets.%s is needed: tls.enabled is true and tls.certManager.enabled is not" .name) (index .root.Values.tls.existingSecrets .name) }}
{{- end -}}
{{- end -}}

{{/* A name that all replicas' certificates have: coordinators call replicas by address. With the namespace in it, as in
     coordinatorName, one authority can serve releases of the same name in several namespaces. */}}
{{- define "specdec.replicaServerName" -}}
{{ .Values.tls.replicaServerName | default (printf "%s-replica.%s.svc" (include "specdec.fullname" .) .Release.Namespace) }}
{{- end -}}

{{- define "specdec.resumeSecretName" -}}
{{ .Values.resumeSecret.existingSecret | default (printf "%s-resume" (include "specdec.fullname" .)) }}
{{- end -}}

{{- define "specdec.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "specdec.podSecurity" -}}
runAsNonRoot: true
seccompProfile:
  type: RuntimeDefault
{{- with .Values.podSecurityContext }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* What `model` of a target or draft is for the process: a hub id, or a directory. */}}
{{- define "specdec.modelArgs" -}}
{{- $source := .model.source -}}
{{- if hasPrefix "hf://" $source -}}
{{- $id := trimPrefix "hf://" $source | splitList "@" -}}
- {{ printf "--model=%s" (first $id) | quote }}
{{- if gt (len $id) 1 }}
- {{ printf "--revision=%s" (last $id) | quote }}
{{- end }}
{{- else if hasPrefix "pvc://" $source -}}
{{- $parts := regexSplit "/" (trimPrefix "pvc://" $source) 2 -}}
- {{ printf "--model=/models/%s" (last $parts) | quote }}
{{- else -}}
- {{ printf "--model=%s" (trimPrefix "image://" $source) | quote }}
{{- end }}
{{- end -}}

{{/* Settings as flags: true and false become --name and --no-name. */}}
{{- define "specdec.settingArgs" -}}
{{- range $name, $value := . }}
{{- $flag := $name | replace "_" "-" }}
{{- if kindIs "bool" $value }}
- {{ printf "--%s%s" (ternary "" "no-" $value) $flag | quote }}
{{- else if kindIs "float64" $value }}
- {{ printf "--%s=%s" $flag (toJson $value) | quote }}
{{- else }}
- {{ printf "--%s=%v" $flag $value | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Not empty when callers of the role, readers of its metrics included, must show a certificate. Argument: {root, name}. */}}
{{- define "specdec.demandsCertificate" -}}
{{- $tls := .root.Values.tls -}}
{{- if and $tls.enabled (ternary $tls.verifyClients $tls.mutual (eq .name "coordinator")) }}true{{ end -}}
{{- end -}}

{{/* The name that a certificate must have to call targets and drafts; empty: any of the authority's. */}}
{{- define "specdec.coordinatorName" -}}
{{- $fromManager := printf "%s.%s.svc" (include "specdec.serviceName" (dict "root" . "name" "coordinator")) .Release.Namespace -}}
{{ .Values.tls.coordinatorName | default (ternary $fromManager "" .Values.tls.certManager.enabled) }}
{{- end -}}

{{/* Not empty when Prometheus must show a certificate to some role. */}}
{{- define "specdec.scraperCertificate" -}}
{{- if and .Values.serviceMonitor.enabled .Values.tls.metrics (or .Values.tls.mutual .Values.tls.verifyClients) }}true{{ end -}}
{{- end -}}

{{/* Flags of tracing. Argument: {root, name}. */}}
{{- define "specdec.tracingArgs" -}}
{{- $tracing := .root.Values.tracing -}}
{{- if $tracing.endpoint }}
- {{ printf "--otlp-endpoint=%s" $tracing.endpoint | quote }}
{{- if $tracing.caSecret }}
- --otlp-ca-file=/etc/specdec/otlp/{{ $tracing.caSecret.key }}
{{- end }}
{{- if eq .name "coordinator" }}
- --trace-sample-ratio={{ $tracing.sampleRatio }}
- --{{ if not $tracing.content }}no-{{ end }}trace-content
{{- end }}
{{- end -}}
{{- end -}}

{{/* Longest a pod may take to end: it leaves the endpoints, drains, closes calls, and has a margin. */}}
{{- define "specdec.gracePeriod" -}}
{{ add .preStopSeconds .drainSeconds .stopGraceSeconds 10 }}
{{- end -}}

{{/* Longest a pod of the role may take to be ready. A coordinator waits for a target, which may start when it does.
     Argument: {root, name}. */}}
{{- define "specdec.startupSeconds" -}}
{{- $seconds := int (index .root.Values .name).startupSeconds -}}
{{ eq .name "coordinator" | ternary (max $seconds (int .root.Values.target.startupSeconds)) $seconds }}
{{- end -}}

{{/* The claim that holds a component's model; empty for other sources. */}}
{{- define "specdec.modelClaim" -}}
{{- if hasPrefix "pvc://" .model.source -}}
{{ regexSplit "/" (trimPrefix "pvc://" .model.source) 2 | first }}
{{- end -}}
{{- end -}}

{{/* The ports that a URL names, after those of a list, as a YAML list. Argument: {url, ports}. */}}
{{- define "specdec.portsOf" -}}
{{- $ports := list -}}
{{- range .ports -}}
{{- $ports = append $ports (int .) -}}
{{- end -}}
{{- range regexFindAll `:[0-9]+([,/?]|$)` .url -1 -}}
{{- $ports = append $ports (regexFind `[0-9]+` . | int) -}}
{{- end -}}
{{- uniq $ports | toYaml -}}
{{- end -}}
