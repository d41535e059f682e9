{{/* Fills in the values that charts of older releases had not: `helm upgrade --reuse-values` keeps such a chart's defaults
     and drops this one's. valuesVersion is then older or missing; what the operator has set to null stays so. Every file
     of templates begins with it, because helm renders files in any order. */}}
{{- define "specdec.complete" -}}
{{- $added := .Files.Get "files/added-values.yaml" | fromYaml -}}
{{- if ne $added.valuesVersion (toString .Values.valuesVersion) -}}
{{- include "specdec.fill" (dict "into" .Values "from" $added) -}}
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
