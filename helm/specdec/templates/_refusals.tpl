{{/* What Kubernetes would refuse of a pod, and a schema cannot express: the values and the chart's own parts add up to it. */}}

{{/* A quantity of Kubernetes or of Redis as a number. */}}
{{- define "specdec.quantity" -}}
{{- if kindIs "string" . -}}
{{- $number := regexFind "^[0-9.]+" . -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024 "kb" 1024 "Mi" 1048576 "mb" 1048576 "Gi" 1073741824 "gb" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 -}}
{{ mulf (float64 $number) (get $units (trimPrefix $number .)) }}
{{- else -}}
{{ . }}
{{- end -}}
{{- end -}}

{{/* Seconds of a duration such as 1h30m. */}}
{{- define "specdec.seconds" -}}
{{- $seconds := 0 -}}
{{- range regexFindAll "[0-9]+[hms]" . -1 -}}
{{- $seconds = regexFind "[0-9]+" . | mul (get (dict "h" 3600 "m" 60 "s" 1) (regexFind "[hms]" .)) | add $seconds -}}
{{- end -}}
{{ $seconds }}
{{- end -}}

{{/* Fails for requests above limits, and for devices that are not whole or of which requests and limits differ.
     Argument: {key, resources}: the values' key, and what it has. */}}
{{- define "specdec.checkResources" -}}
{{- $key := .key -}}
{{- $limits := .resources.limits | default dict -}}
{{- range $name, $limit := $limits -}}
{{- if and (contains "/" $name) (not (regexMatch "^[0-9]+$" (toString $limit))) -}}
{{- fail (printf "%s.limits: %s is %v, and devices are whole" $key $name $limit) -}}
{{- end -}}
{{- end -}}
{{- range $name, $request := .resources.requests | default dict -}}
{{- if and (contains "/" $name) (ne (toString $request) (get $limits $name | toString)) -}}
{{- fail (printf "%s.limits: %s must be as many as %s.requests has: devices are not shared" $key $name $key) -}}
{{- end -}}
{{- if hasKey $limits $name -}}
{{- $limit := get $limits $name -}}
{{- if gt (include "specdec.quantity" $request | float64) (include "specdec.quantity" $limit | float64) -}}
{{- fail (printf "%s.requests: %s (%v) is above %s.limits (%v): set both" $key $name $request $key $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Fails for a second volume, container, variable or mount of the same name, and for a mount of no volume. Argument: {role, spec}. */}}
{{- define "specdec.checkPod" -}}
{{- $role := .role -}}
{{- $volumes := list -}}
{{- range .spec.volumes -}}
{{- if has .name $volumes -}}
{{- fail (printf "%s.extraVolumes: the pod has a volume %s already: give it another name" $role .name) -}}
{{- end -}}
{{- $volumes = append $volumes .name -}}
{{- end -}}
{{- $containers := list -}}
{{- range concat (.spec.containers) (.spec.initContainers | default list) -}}
{{- if has .name $containers -}}
{{- fail (printf "%s.initContainers: the pod has a container %s already: give it another name" $role .name) -}}
{{- end -}}
{{- $containers = append $containers .name -}}
{{- $isOurs := has .name (list $role "fetch") -}}
{{- $key := printf "%s.%s" $role (ternary "extraVolumeMounts" "initContainers" $isOurs) -}}
{{- $paths := list -}}
{{- range .volumeMounts -}}
{{- if has .mountPath $paths -}}
{{- fail (printf "%s: something is mounted at %s already" $key .mountPath) -}}
{{- end -}}
{{- $paths = append $paths .mountPath -}}
{{- if not (has .name $volumes) -}}
{{- fail (printf "%s: there is no volume %s: add it to %s.extraVolumes" $key .name $role) -}}
{{- end -}}
{{- end -}}
{{- $variables := list -}}
{{- range .env -}}
{{- if has .name $variables -}}
{{- fail (printf "%s.%s: the variable %s is there twice" $role (ternary "extraEnv" "initContainers" $isOurs) .name) -}}
{{- end -}}
{{- $variables = append $variables .name -}}
{{- end -}}
{{- if not $isOurs -}}
{{- include "specdec.checkResources" (dict "key" (printf "%s.initContainers: resources of %s" $role .name) "resources" (.resources | default dict)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
