{{/*
Fails if the operator of another installation would act on the same jobs: each would undo what the other does. The
operators of one installation share a lease, which has the name of the binding, and a release may rename its own. A
render without a cluster finds no other.
*/}}
{{- define "emberscale.checkOneOperator" -}}
{{- $kind := "rbac.authorization.k8s.io/v1" }}
{{- $ours := printf "%s of the namespace %s" (include "emberscale.operator" .) .Release.Namespace }}
{{- $bindings := list }}
{{- /* whoever installs Roles alone may have no right to list what is of the whole cluster */}}
{{- if or (empty .Values.operator.watchNamespaces) .Values.rbac.aggregate }}
{{- $bindings = dig "items" list (lookup $kind "ClusterRoleBinding" "" "") }}
{{- end }}
{{- range default (list "") .Values.operator.watchNamespaces }}
{{- $bindings = concat $bindings (dig "items" list (lookup $kind "RoleBinding" . "")) }}
{{- end }}
{{- range $bindings }}
{{- $labels := default dict .metadata.labels }}
{{- $component := list (dig "app.kubernetes.io/part-of" "" $labels) (dig "app.kubernetes.io/component" "" $labels) }}
{{- if and (eq (join "/" $component) "emberscale/operator") (not (hasSuffix "-lease" .metadata.name)) }}
{{- $theirs := printf "%s of the namespace %s" .metadata.name (index .subjects 0).namespace }}
{{- $notes := default dict .metadata.annotations }}
{{- $release := list (dig "meta.helm.sh/release-name" "" $notes) (dig "meta.helm.sh/release-namespace" "" $notes) }}
{{- if not (or (eq $theirs $ours) (eq (join "/" $release) (printf "%s/%s" $.Release.Name $.Release.Namespace))) }}
{{- $where := ternary (printf "the namespace %s" .metadata.namespace) "all namespaces" (hasKey .metadata "namespace") }}
{{- fail (printf "the operator %s already acts on the jobs of %s: uninstall it first, or give each installation its own operator.watchNamespaces" $theirs $where) }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
