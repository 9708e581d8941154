{{- define "minisgl.check" -}}
{{- if or (gt (len .Release.Name) 40) (contains "." .Release.Name) }}
{{- fail (printf "the release name %s: names of pods are made from it; choose one of at most 40 characters without dots" .Release.Name) }}
{{- end }}
{{- if and .Values.redis.url (not .Values.redis.secret) }}
{{- fail "redis.secret: it is empty, and redis.url is set; name the Secret with the passwords of its users" }}
{{- end }}
{{- if gt (int .Values.autoscaling.min) (int .Values.autoscaling.max) }}
{{- fail (printf "autoscaling.min %d: more than autoscaling.max %d" (int .Values.autoscaling.min) (int .Values.autoscaling.max)) }}
{{- end }}
{{- end }}

{{- define "minisgl.labels" -}}
app.kubernetes.io/name: minisgl
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "minisgl.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "minisgl.passwords" -}}
{{ .Values.redis.secret | default (printf "%s-redis" .Release.Name) }}
{{- end }}

{{/* The Services of Redis' pods, with spaces between them. */}}
{{- define "minisgl.redisHosts" -}}
{{- $hosts := list }}
{{- range $i := until (int .Values.redis.replicas) }}
{{- $hosts = append $hosts (printf "%s-redis-%d.%s.svc.%s" $.Release.Name $i $.Release.Namespace $.Values.clusterDomain) }}
{{- end }}
{{- join " " $hosts }}
{{- end }}

{{/* The URL for one user: {root: ., user: web}. */}}
{{- define "minisgl.redisUrl" -}}
{{- $redis := .root.Values.redis }}
{{- $hosts := splitList " " (include "minisgl.redisHosts" .root) }}
{{- if $redis.url }}
{{- $redis.url | replace "%USER%" .user }}
{{- else if eq (int $redis.replicas) 1 }}
{{- printf "redis://%s@%s:6379/0?password_file=/passwords/%s" .user (first $hosts) .user }}
{{- else }}
{{- $sentinels := list }}
{{- range $hosts }}{{ $sentinels = append $sentinels (printf "%s:26379" .) }}{{ end }}
{{- printf "redis+sentinel://%s@%s/minisgl/0?password_file=/passwords/%s&sentinel_username=lookup&sentinel_password_file=/passwords/lookup" .user (join "," $sentinels) .user }}
{{- end }}
{{- end }}

{{- define "minisgl.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .user }}
runAsGroup: {{ .user }}
fsGroup: {{ .user }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "minisgl.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* The pod of a stage, or of the tools: {root: ., stage: web, config: .Values.web, args: [..], env: [..]}. */}}
{{- define "minisgl.pod" -}}
{{- $values := .root.Values }}
{{- $user := eq .stage "tools" | ternary "operator" .stage }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ eq .stage "web" | ternary 60 30 }}
securityContext:
  {{- include "minisgl.podSecurity" (dict "user" 10001) | nindent 2 }}
{{- with $values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .config.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .config.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "minisgl.labels" .root | nindent 8 }}
        app.kubernetes.io/component: {{ .stage }}
dnsConfig:
  options:
    - {name: ndots, value: "2"} # names in the cluster are whole: one of a pod that has gone is not asked for elsewhere
containers:
  - name: {{ .stage }}
    image: {{ include "minisgl.image" .root }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    {{- if eq .stage "tools" }}
    command: [sh, -c, "trap exit TERM; sleep infinity & wait"]
    {{- else }}
    args: {{ concat (list "stage" .stage "--wait-for-redis" "600") .args .config.args | toJson }}
    {{- end }}
    env:
      - {name: MINISGL_REDIS_URL, value: {{ include "minisgl.redisUrl" (dict "root" .root "user" $user) | quote }}}
      - {name: MINISGL_NAMESPACE, value: {{ $values.namespace | quote }}}
      - {name: HOME, value: /tmp}
      {{- if has .stage (list "tokenize" "generate" "detokenize") }}
      {{- with $values.model }}
      - {name: MINISGL_MODEL, value: {{ . | quote }}}
      {{- end }}
      {{- with $values.hub.secret }}
      - name: HF_TOKEN
        valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
      {{- end }}
      {{- end }}
      {{- range .env }}
      - {{ toJson . }}
      {{- end }}
      {{- range $name, $value := $values.env }}
      - {name: {{ $name }}, value: {{ $value | quote }}}
      {{- end }}
    securityContext:
      {{- include "minisgl.containerSecurity" . | nindent 6 }}
    {{- if eq .stage "web" }}
    ports:
      - {name: http, containerPort: 1919}
    startupProbe:
      httpGet: {path: /health, port: http}
      periodSeconds: 2
      failureThreshold: 60
    livenessProbe:
      httpGet: {path: /health, port: http}
      timeoutSeconds: 5
      failureThreshold: 6
    readinessProbe:
      httpGet: {path: "/ready?for=requests", port: http}
      periodSeconds: 5
      timeoutSeconds: 5
      failureThreshold: 3
    lifecycle:
      # Proxies hear that the pod goes before it takes no new requests.
      preStop: {sleep: {seconds: 5}}
    {{- else if ne .stage "tools" }}
    readinessProbe:
      exec: {command: [test, -f, /tmp/ready]}
      periodSeconds: 2
    {{- end }}
    resources:
      {{- $resources := deepCopy .config.resources }}
      {{- if and (eq .stage "generate") (gt (int .config.gpus) 0) }}
      {{- $_ := set $resources "limits" (merge (dict .config.gpuResource (int .config.gpus)) ($resources.limits | default dict)) }}
      {{- end }}
      {{- toYaml $resources | nindent 6 }}
    volumeMounts:
      - {name: passwords, mountPath: /passwords, readOnly: true}
      - {name: tmp, mountPath: /tmp}
      - {name: models, mountPath: /models}
      {{- if eq .stage "generate" }}
      - {name: shm, mountPath: /dev/shm}
      {{- end }}
      {{- if and $values.archive.enabled (has .stage (list "web" "archive" "tools")) }}
      - {name: archive, mountPath: /archive}
      {{- end }}
volumes:
  - name: passwords
    secret:
      secretName: {{ include "minisgl.passwords" .root }}
      defaultMode: 0440
      items:
        - {key: {{ $user }}, path: {{ $user }}}
        {{- if and (not $values.redis.url) (gt (int $values.redis.replicas) 1) }}
        - {key: lookup, path: lookup}
        {{- end }}
  - {name: tmp, emptyDir: {}}
  - name: models
    {{- if and $values.models.claim (has .stage (list "tokenize" "generate" "detokenize")) }}
    persistentVolumeClaim: {claimName: {{ $values.models.claim }}}
    {{- else }}
    emptyDir: {}
    {{- end }}
  {{- if eq .stage "generate" }}
  - {name: shm, emptyDir: {medium: Memory}}
  {{- end }}
  {{- if and $values.archive.enabled (has .stage (list "web" "archive" "tools")) }}
  - name: archive
    persistentVolumeClaim: {claimName: {{ required "archive.claim: name the PersistentVolumeClaim of the archive" $values.archive.claim }}}
  {{- end }}
{{- end }}
