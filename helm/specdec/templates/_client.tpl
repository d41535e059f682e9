{{/* Pods that call the coordinators as clients do. Argument: the root. */}}

{{- define "specdec.clientArgs" -}}
- --address={{ include "specdec.serviceName" (dict "root" . "name" "coordinator") }}:50051
{{- if .Values.tls.enabled }}
- --tls-ca=/etc/specdec/tls/ca.crt
{{- if .Values.tls.verifyClients }}
- --tls-cert=/etc/specdec/tls/tls.crt
- --tls-key=/etc/specdec/tls/tls.key
{{- end }}
{{- end }}
{{- end -}}

{{- define "specdec.clientEnvironment" -}}
- {name: HOME, value: /tmp}
{{- if and .Values.apiKeys.existingSecret .Values.test.apiKeySecret }}
- name: SPECDEC_API_KEY
  valueFrom:
    secretKeyRef: {{- toYaml .Values.test.apiKeySecret | nindent 6 }}
{{- end }}
{{- with .Values.test.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "specdec.clientMounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: /etc/specdec/tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "specdec.clientVolumes" -}}
- name: tmp
  emptyDir: {sizeLimit: {{ .Values.coordinator.tmpSizeLimit }}}
{{- if .Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ include "specdec.tlsSecretName" (dict "root" . "name" "coordinator") }}, defaultMode: 0440}
{{- end }}
{{- end -}}
