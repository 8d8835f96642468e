{{- define "emberscale.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "emberscale.operator" -}}{{ include "emberscale.fullname" . }}-operator{{- end -}}
{{- define "emberscale.redis" -}}{{ include "emberscale.fullname" . }}-redis{{- end -}}
{{- define "emberscale.flashRedis" -}}{{ include "emberscale.fullname" . }}-flash-redis{{- end -}}

{{- define "emberscale.brain" -}}{{ include "emberscale.fullname" . }}-brain{{- end -}}
{{- define "emberscale.postgresql" -}}{{ include "emberscale.fullname" . }}-postgresql{{- end -}}

{{/* Where masters find the brain; empty where there is none. */}}
{{- define "emberscale.brainAddress" -}}
{{- if .Values.brain.enabled -}}
{{ include "emberscale.brain" . }}.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}:50061
{{- else -}}
{{ .Values.brain.external.address }}
{{- end -}}
{{- end -}}

{{/* The Secret with the brain's token. */}}
{{- define "emberscale.brainSecret" -}}
{{- if .Values.brain.enabled -}}
{{- default (include "emberscale.brain" .) .Values.brain.auth.existingSecret -}}
{{- else -}}
{{- required "brain.external.address needs brain.external.existingSecret, with the key token" .Values.brain.external.existingSecret -}}
{{- end -}}
{{- end -}}

{{/* The Secret with the brain's certificate; empty where the brain serves no TLS. */}}
{{- define "emberscale.brainTlsSecret" -}}
{{- if .Values.tls.enabled -}}
{{- if and .Values.brain.enabled (not .Values.tls.brainSecret) -}}
{{ include "emberscale.brain" . }}-tls
{{- else -}}
{{ .Values.tls.brainSecret }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The Secret that holds the URL of the brain's database, and the key in it. */}}
{{- define "emberscale.databaseSecret" -}}
{{- if .Values.postgresql.enabled -}}
{{- default (include "emberscale.postgresql" .) .Values.postgresql.auth.existingSecret -}}
{{- else -}}
{{- default (printf "%s-database-url" (include "emberscale.fullname" .)) .Values.postgresql.external.existingSecret -}}
{{- end -}}
{{- end -}}

{{- define "emberscale.databaseSecretKey" -}}
{{- if .Values.postgresql.enabled -}}url{{- else -}}{{ .Values.postgresql.external.existingSecretKey }}{{- end -}}
{{- end -}}

{{- define "emberscale.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "emberscale.operator" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is needed where serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Labels that select a component's pods; they never change. Takes a dict of root and component. */}}
{{- define "emberscale.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of an object. Takes a dict of root and component. */}}
{{- define "emberscale.labels" -}}
{{ include "emberscale.selector" . }}
app.kubernetes.io/part-of: emberscale
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Name of an image. Takes a block with registry, repository and tag, and the default tag. */}}
{{- define "emberscale.imageName" -}}
{{- with .image.registry }}{{ . }}/{{ end }}{{ .image.repository }}:{{ default .defaultTag .image.tag }}
{{- end -}}

{{- define "emberscale.image" -}}
{{ include "emberscale.imageName" (dict "image" .Values.image "defaultTag" .Chart.AppVersion) }}
{{- end -}}

{{/* The image of the operator and the brain. */}}
{{- define "emberscale.controlPlaneImage" -}}
{{- if .Values.controlPlane.image.repository -}}
{{ include "emberscale.imageName" (dict "image" .Values.controlPlane.image "defaultTag" .Chart.AppVersion) }}
{{- else -}}
{{ include "emberscale.image" . }}
{{- end -}}
{{- end -}}

{{/* The Secret that holds the URL of the Redis for flash checkpoints, and the key in it; empty where there is none. */}}
{{- define "emberscale.flashRedisSecret" -}}
{{- if .Values.redis.flash.enabled -}}
{{- default (include "emberscale.flashRedis" .) .Values.redis.flash.auth.existingSecret -}}
{{- else if or .Values.redis.flash.url .Values.redis.flash.existingSecret -}}
{{- default (printf "%s-flash-redis-url" (include "emberscale.fullname" .)) .Values.redis.flash.existingSecret -}}
{{- end -}}
{{- end -}}

{{- define "emberscale.flashRedisSecretKey" -}}
{{- if .Values.redis.flash.enabled -}}url{{- else -}}{{ .Values.redis.flash.existingSecretKey }}{{- end -}}
{{- end -}}

{{/* The Secret that holds the URL of Redis, and the key in it. */}}
{{- define "emberscale.redisSecret" -}}
{{- if .Values.redis.enabled -}}
{{- default (include "emberscale.redis" .) .Values.redis.auth.existingSecret -}}
{{- else -}}
{{- default (printf "%s-redis-url" (include "emberscale.fullname" .)) .Values.redis.external.existingSecret -}}
{{- end -}}
{{- end -}}

{{- define "emberscale.redisSecretKey" -}}
{{- if .Values.redis.enabled -}}url{{- else -}}{{ .Values.redis.external.existingSecretKey }}{{- end -}}
{{- end -}}

{{/* Selects the namespaces of jobs, by labels that whoever may create pods in them cannot set. */}}
{{- define "emberscale.jobNamespaces" -}}
{{- if .Values.networkPolicy.jobNamespaces -}}
{{- toYaml .Values.networkPolicy.jobNamespaces -}}
{{- else if .Values.operator.watchNamespaces -}}
matchExpressions:
  - key: kubernetes.io/metadata.name
    operator: In
    values:
      {{- toYaml .Values.operator.watchNamespaces | nindent 6 }}
{{- else -}}
{}
{{- end -}}
{{- end -}}

{{/*
What the values say of a Secret that the chart writes. Empty where the Secret is the user's own, and where the chart makes
up its password: that one stays, and has no checksum from the first install on, so that no upgrade restarts a pod for it.
*/}}
{{- define "emberscale.givenRedis" -}}
{{- if .Values.redis.enabled -}}
{{- if not .Values.redis.auth.existingSecret }}{{ .Values.redis.auth.password }}{{ end -}}
{{- else if not .Values.redis.external.existingSecret -}}
{{ .Values.redis.external.url }}
{{- end -}}
{{- end -}}

{{- define "emberscale.givenFlashRedis" -}}
{{- if .Values.redis.flash.enabled -}}
{{- if not .Values.redis.flash.auth.existingSecret }}{{ .Values.redis.flash.auth.password }}{{ end -}}
{{- else if not .Values.redis.flash.existingSecret -}}
{{ .Values.redis.flash.url }}
{{- end -}}
{{- end -}}

{{- define "emberscale.givenBrain" -}}
{{- if and .Values.brain.enabled (not .Values.brain.auth.existingSecret) }}{{ .Values.brain.auth.token }}{{ end -}}
{{- end -}}

{{- define "emberscale.givenDatabase" -}}
{{- if .Values.postgresql.enabled -}}
{{- if not .Values.postgresql.auth.existingSecret }}{{ .Values.postgresql.auth.password }}{{ end -}}
{{- else if not .Values.postgresql.external.existingSecret -}}
{{ .Values.postgresql.external.url }}
{{- end -}}
{{- end -}}

{{/* Replaces a pod for other secrets, which its processes read at their start. Takes what is given of each of them. */}}
{{- define "emberscale.secretChecksum" -}}
{{- if join "" . -}}
checksum/secret: {{ toJson . | sha256sum }}
{{- end -}}
{{- end -}}
