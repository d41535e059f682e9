{{/* Fills in the values that charts of older releases had not: `helm upgrade --reuse-values` keeps such a chart's defaults
     and drops this one's. valuesVersion is then older or missing; what the operator has set to null stays so. Every file
     of templates begins with it, because helm renders files in any order. */}}
{{- define "specdec.complete" -}}
{{- $added := .Files.Get "files/added-values.yaml" | fromYaml -}}
{{- if ne $added.valuesVersion (toString .Values.valuesVersion) -}}
{{- include "specdec.fill" (dict "into" .Values "from" $added) -}}
{{- end -}}
{{- include "specdec.keep" . -}}
{{- end -}}

{{/* A key whose lines are all commented out is null, and helm then drops its defaults. Empty defaults come back; fails by
     name for a key without which nothing can be rendered. */}}
{{- define "specdec.keep" -}}
{{- $needed := list "global" "tls" "tls.enabled" "redis" "resumeSecret" "resumeSecret.key" "secretsJob" "secretsJob.resources" "upgradeCheck" "apiKeys" "networkPolicy" "serviceMonitor" "prometheusRule" "dashboards" "dashboards.labels" "tracing" "test" "test.resources" "test.timeoutSeconds" "inferencePool" "gpuClaim" "redis.bundled" -}}
{{- range list "image" "resources" "passwordKey" "serviceAccount" "serviceAccount.create" -}}
{{- $needed = append $needed (printf "redis.bundled.%s" .) -}}
{{- end -}}
{{- range $role := list "coordinator" "gateway" "target" "draft" -}}
{{- $keys := list "image" "probes" "probes.readiness" "probes.liveness" "preStopSeconds" "updateStep" "resources" "tmpSizeLimit" "serviceAccount" "serviceAccount.create" "podDisruptionBudget" "podDisruptionBudget.maxUnavailable" "autoscaling" -}}
{{- $own := dict "coordinator" (list "service" "grpcRoute") "gateway" (list "service" "service.port" "ingress" "httpRoute") -}}
{{- $engine := list "model" "model.s3" "model.fetch" "model.fetch.resources" "gpu" -}}
{{- if ne $role "gateway" -}}
{{- $keys = concat $keys (list "cache" "cache.sizeLimit") -}}
{{- end -}}
{{- $needed = append $needed $role -}}
{{- range concat $keys (get $own $role | default $engine) -}}
{{- $needed = append $needed (printf "%s.%s" $role .) -}}
{{- end -}}
{{- end -}}
{{- $values := .Values -}}
{{- range $key := $needed -}}
{{- $value := $values -}}
{{- range splitList "." $key -}}
{{- if not (and (hasKey $value .) (not (kindIs "invalid" (get $value .)))) -}}
{{- fail (printf "%s is null: leave the key out for its default" $key) -}}
{{- end -}}
{{- $value = get $value . -}}
{{- end -}}
{{- end -}}
{{- $empty := dict "settings" dict "podLabels" dict "extraEnv" list -}}
{{- range list "coordinator" "gateway" "target" "draft" -}}
{{- include "specdec.fill" (dict "into" (get $values .) "from" (deepCopy $empty)) -}}
{{- end -}}
{{- include "specdec.fill" (dict "into" $values "from" (dict "imagePullSecrets" list)) -}}
{{- range list "target" "draft" -}}
{{- include "specdec.fill" (dict "into" (get $values .).model.s3 "from" (dict "endpoint" "")) -}}
{{- end -}}
{{- end -}}

{{/* Sets the keys that `into` lacks, at every depth. */}}
{{- define "specdec.fill" -}}
{{- $into := .into -}}
{{- range $key, $value := .from -}}
{{- if not (hasKey $into $key) -}}
{{- $_ := set $into $key $value -}}
{{- else if and (kindIs "map" $value) (kindIs "map" (get $into $key)) -}}
{{- include "specdec.fill" (dict "into" (get $into $key) "from" $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
