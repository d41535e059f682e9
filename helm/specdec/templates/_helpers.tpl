{{/* A name of at most `max` characters; a cut one ends in a digest, so that long names stay different. Argument: {name, max}. */}}
{{- define "specdec.shortened" -}}
{{- if gt (len .name) (int .max) -}}
{{ .name | trunc (sub (int .max) 9 | int) | trimSuffix "-" }}-{{ sha256sum .name | trunc 8 }}
{{- else -}}
{{ .name }}
{{- end -}}
{{- end -}}

{{/* Name of all the release's objects: a DNS label that begins with a letter, which Services need and releases do not;
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

{{/* Labels of selectors, which are immutable. Argument: {root, name}. */}}
{{- define "specdec.selectorLabels" -}}
app.kubernetes.io/name: specdec
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .name }}
{{- end -}}

{{/* Labels of objects. Pods lack the version's, so that a new chart version alone restarts nothing. */}}
{{- define "specdec.labels" -}}
{{ include "specdec.podLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | replace "+" "_" | trunc 63 | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | quote }}
{{- end -}}

{{/* Labels of pods. Argument: {root, name}. */}}
{{- define "specdec.podLabels" -}}
{{ include "specdec.selectorLabels" . }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The deployed roles as a YAML list, with the ports and services that the code fixes. */}}
{{- define "specdec.roles" -}}
{{- if .Values.target.enabled }}
- {name: coordinator, port: 50051, metricsPort: 9090, grpcService: specdec.v1.CoordinatorService}
{{- end }}
{{- if .Values.gateway.enabled }}
- {name: gateway, port: 8000, metricsPort: 9094}
{{- end }}
{{- if .Values.target.enabled }}
- {name: target, port: 50052, metricsPort: 9092, grpcService: specdec.v1.TargetService}
{{- end }}
{{- if .Values.draft.enabled }}
- {name: draft, port: 50053, metricsPort: 9093, grpcService: specdec.v1.DraftService}
{{- end }}
{{- end -}}

{{- define "specdec.headlessName" -}}
{{ include "specdec.fullname" .root }}-{{ .name }}-headless
{{- end -}}

{{/* Coordinators and gateways are called through a load-balanced Service, replicas one by one through a headless one. */}}
{{- define "specdec.serviceName" -}}
{{- if has .name (list "coordinator" "gateway") -}}
{{ include "specdec.fullname" .root }}-{{ .name }}
{{- else -}}
{{ include "specdec.headlessName" . }}
{{- end -}}
{{- end -}}

{{/* The service account of a role or of the bundled Redis: create, name, annotations. Argument: {root, name}. */}}
{{- define "specdec.serviceAccountOf" -}}
{{- $account := (eq .name "redis" | ternary .root.Values.redis.bundled (index .root.Values .name)).serviceAccount -}}
{{- $name := ternary (printf "%s-%s" (include "specdec.fullname" .root) .name) "default" $account.create -}}
create: {{ $account.create }}
name: {{ $account.name | default $name | quote }}
annotations: {{ get $account "annotations" | default dict | toJson }}
{{- end -}}

{{/* Argument: {root, image}; image.tag empty: global.imageTag, else the chart's version. */}}
{{- define "specdec.image" -}}
{{- with .root.Values.global.imageRegistry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .root.Values.global.imageTag | default (.root.Chart.AppVersion | replace "+" "_") }}
{{- end -}}
{{- end -}}

{{- define "specdec.tlsSecretName" -}}
{{- if .root.Values.tls.certManager.enabled -}}
{{ include "specdec.fullname" .root }}-{{ .name }}-tls
{{- else -}}
{{ required (printf "tls.existingSecrets.%s is needed: tls.enabled is true and tls.certManager.enabled is not" .name) (index .root.Values.tls.existingSecrets .name) }}
{{- end -}}
{{- end -}}

{{/* A name in all replicas' certificates, because coordinators call replicas by address. The namespace in it, and in
     coordinatorName, lets one authority serve releases of the same name in several namespaces. */}}
{{- define "specdec.replicaServerName" -}}
{{ .Values.tls.replicaServerName | default (printf "%s-replica.%s.svc" (include "specdec.fullname" .) .Release.Namespace) }}
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

{{/* The process's flags for `model` of a target or draft: a hub id or a directory. */}}
{{- define "specdec.modelArgs" -}}
{{- $source := .model.source -}}
{{- if regexMatch "^(hf|s3)://" $source -}}
{{- $id := trimPrefix "hf://" $source | splitList "@" -}}
- {{ printf "--model=%s" (first $id) | quote }}
{{- if gt (len $id) 1 }}
- {{ printf "--revision=%s" (last $id) | quote }}
{{- end }}
{{- else if regexMatch "^(pvc|oci)://" $source -}}
{{- $parts := regexSplit (ternary "#" "/" (hasPrefix "oci://" $source)) (regexReplaceAll "^[a-z]+://" $source "") 2 -}}
- {{ printf "--model=%s" (printf "/models/%s" (index (append $parts "") 1) | trimSuffix "/") | quote }}
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

{{/* Not empty when the role's port has TLS. Argument: {root, name}. */}}
{{- define "specdec.servesTls" -}}
{{- $tls := .root.Values.tls -}}
{{- if and $tls.enabled (or $tls.https (ne .name "gateway")) }}true{{ end -}}
{{- end -}}

{{/* Not empty when callers of the role, readers of its metrics included, must show a certificate. Argument: {root, name}. */}}
{{- define "specdec.demandsCertificate" -}}
{{- $tls := .root.Values.tls -}}
{{- $demands := dict "coordinator" $tls.verifyClients "gateway" $tls.verifyHttpClients -}}
{{- if and (include "specdec.servesTls" .) (get $demands .name | default false | ternary true (and $tls.mutual (not (hasKey $demands .name)))) }}true{{ end -}}
{{- end -}}

{{/* Not empty when the role may trust whoever reaches it: network policies say who does, and no key could. Argument: {root, name}. */}}
{{- define "specdec.trustsNetwork" -}}
{{- $hasKeys := and .root.Values.apiKeys.existingSecret (has .name (list "coordinator" "gateway")) -}}
{{- if and .root.Values.networkPolicy.enabled (not $hasKeys) }}true{{ end -}}
{{- end -}}

{{/* Not empty when a coordinator or gateway knows its callers by key or certificate, or its user lets everyone call. Argument: {root, name}. */}}
{{- define "specdec.knowsCallers" -}}
{{- $values := index .root.Values .name -}}
{{- $told := or (get $values.settings "allow_unauthenticated") (has "--allow-unauthenticated" $values.extraArgs) -}}
{{- if or $told .root.Values.apiKeys.existingSecret (include "specdec.demandsCertificate" .) }}true{{ end -}}
{{- end -}}

{{/* Label of pods of this namespace that may call coordinators and gateways which do not know their callers, and drafts
     without targets. */}}
{{- define "specdec.clientLabel" -}}
{{ include "specdec.fullname" . }}-client
{{- end -}}

{{/* Peers in a policy that may call a coordinator, a gateway or a draft without targets, as a YAML list; empty: everyone. Argument: {root, name}. */}}
{{- define "specdec.callers" -}}
{{- $policy := .root.Values.networkPolicy -}}
{{- with ternary $policy.httpClients $policy.clients (eq .name "gateway") -}}
{{ toYaml . }}
{{- else -}}
{{- if or (eq .name "draft") (not (include "specdec.knowsCallers" .)) -}}
- podSelector:
    matchLabels: {{ printf "{%s: \"true\"}" (include "specdec.clientLabel" .root) }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The name in coordinators' certificates that targets and drafts check; empty: any certificate of the authority. */}}
{{- define "specdec.coordinatorName" -}}
{{- $fromManager := printf "%s.%s.svc" (include "specdec.serviceName" (dict "root" . "name" "coordinator")) .Release.Namespace -}}
{{ .Values.tls.coordinatorName | default (ternary $fromManager "" .Values.tls.certManager.enabled) }}
{{- end -}}

{{/* Not empty when Prometheus must show a certificate to some role. */}}
{{- define "specdec.scraperCertificate" -}}
{{- if and .Values.serviceMonitor.enabled .Values.tls.metrics (or .Values.tls.mutual .Values.tls.verifyClients .Values.tls.verifyHttpClients) }}true{{ end -}}
{{- end -}}

{{/* Flags of tracing. Argument: {root, name}. */}}
{{- define "specdec.tracingArgs" -}}
{{- $tracing := .root.Values.tracing -}}
{{- if $tracing.endpoint }}
- {{ printf "--otlp-endpoint=%s" $tracing.endpoint | quote }}
{{- if $tracing.caSecret }}
- --otlp-ca-file=/etc/specdec/otlp/{{ $tracing.caSecret.key }}
{{- end }}
{{- if has .name (list "coordinator" "gateway") }}
- --trace-sample-ratio={{ $tracing.sampleRatio }}
{{- end }}
{{- if eq .name "coordinator" }}
- --{{ if not $tracing.content }}no-{{ end }}trace-content
{{- end }}
{{- end -}}
{{- end -}}

{{/* Seconds for a pod to end: it leaves the endpoints, drains, closes calls, and has a margin. */}}
{{- define "specdec.gracePeriod" -}}
{{ add .preStopSeconds .drainSeconds .stopGraceSeconds 10 }}
{{- end -}}

{{/* Not empty when the role asks a target at its start. Argument: {root, name}. */}}
{{- define "specdec.asksTarget" -}}
{{- if and (eq .name "draft") .root.Values.draft.enabled .root.Values.target.enabled .root.Values.draft.asksTarget }}true{{ end -}}
{{- end -}}

{{/* Not empty when the role calls targets, at its start or while it drafts. Argument: {root, name}. */}}
{{- define "specdec.callsTargets" -}}
{{- if and (eq .name "draft") .root.Values.draft.enabled .root.Values.target.enabled (or .root.Values.draft.asksTarget .root.Values.draft.directLinks) }}true{{ end -}}
{{- end -}}

{{/* Seconds for a service of the role to start, by its value and twice what its model's size needs. */}}
{{- define "specdec.loadSeconds" -}}
{{- $model := .model | default dict -}}
{{- $seconds := divf (mulf 2048 ($model.sizeGiB | default 0)) ($model.readMiBPerSecond | default 100) | ceil -}}
{{ max (int .startupSeconds) (int $seconds) }}
{{- end -}}

{{/* Seconds for the download before a service starts. Argument: the role's values. */}}
{{- define "specdec.fetchSeconds" -}}
{{- $fetch := dig "fetch" dict (.model | default dict) -}}
{{ ternary $fetch.timeoutSeconds 0 ($fetch.enabled | default false) }}
{{- end -}}

{{/* Seconds for a pod of the role to start. A coordinator, and a draft that asks a target, also wait for a target that
     starts at the same time. Argument: {root, name}. */}}
{{- define "specdec.startupSeconds" -}}
{{- $seconds := int (include "specdec.loadSeconds" (index .root.Values .name)) -}}
{{- $target := add (include "specdec.loadSeconds" .root.Values.target) (include "specdec.fetchSeconds" .root.Values.target) | int -}}
{{ or (eq .name "coordinator") (eq (include "specdec.asksTarget" .) "true") | ternary (max $seconds $target) $seconds }}
{{- end -}}

{{/* Seconds for a pod of the role to be ready: a gateway also waits for a coordinator. Argument: {root, name}. */}}
{{- define "specdec.readySeconds" -}}
{{- $own := int (include "specdec.startupSeconds" .) -}}
{{- $own = add $own (include "specdec.fetchSeconds" (index .root.Values .name)) | int -}}
{{ eq .name "gateway" | ternary (int (include "specdec.startupSeconds" (dict "root" .root "name" "coordinator")) | add $own) $own }}
{{- end -}}

{{/* Models of other releases that gateways lead to, NAME=ADDRESS[@PERCENT] separated by commas. Argument: the root. */}}
{{- define "specdec.modelsOfOthers" -}}
{{- $models := list -}}
{{- range .Values.gateway.models -}}
{{- $share := hasKey . "share" | ternary (printf "@%v" .share) "" -}}
{{- $models = append $models (printf "%s=%s%s" .name .address $share) -}}
{{- end -}}
{{- join "," $models -}}
{{- end -}}

{{/* The ports of a list and those in a URL, as a YAML list. Argument: {url, ports}. */}}
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
