{{/* What the brain reads; the database's URL comes from a Secret. */}}
{{- define "emberscale.brainSettings" -}}
listen: 0.0.0.0:50061
metrics: 0.0.0.0:9461
tokenFile: /run/emberscale/token
cluster:
  {{- range $key, $value := .Values.brain.cluster }}
  {{- if not (kindIs "invalid" $value) }}
  {{ $key }}: {{ $value | toString | quote }}
  {{- end }}
  {{- end }}
quotas:
  {{- toYaml .Values.brain.quotas | nindent 2 }}
bounds:
  {{- toYaml .Values.brain.bounds | nindent 2 }}
planner:
  {{- toYaml .Values.brain.planner | nindent 2 }}
planning:
  {{- toYaml .Values.brain.planning | nindent 2 }}
retention:
  {{- toYaml .Values.brain.retention | nindent 2 }}
{{- end -}}
