{{- define "labels" -}}
app.kubernetes.io/name: {{ .Values.project | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: {{ .Values.component }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- /* A Service is called like a host, so its name starts with a letter. */}}
{{- define "service" -}}
{{ if regexMatch "^[0-9]" .Release.Name }}project-{{ end }}{{ .Release.Name }}
{{- end }}

{{- define "job" -}}
completionMode: Indexed
completions: {{ .Values.machines }}
parallelism: {{ .Values.machines }}
ttlSecondsAfterFinished: 604800 # a week; what matters is on the volume
# A crash ends the pods of all machines, and each of them counts: with the sixth crash the Job fails.
backoffLimit: {{ if eq .Values.component "training" }}{{ sub (mul 6 .Values.machines) 1 }}{{ else }}0{{ end }}
podReplacementPolicy: Failed # none may start while another one saves
podFailurePolicy:
  rules:
    # Preempted, evicted, its node drained or lost: not the run's fault.
    - action: Ignore
      onPodConditions:
        - type: DisruptionTarget
          status: "True"
    # Told to stop: 75 has saved, 143 had nothing to save yet.
    - action: Ignore
      onExitCodes:
        containerName: train
        operator: In
        values: [75, 143]
    # The command line is wrong: another try would end the same.
    - action: FailJob
      onExitCodes:
        containerName: train
        operator: In
        values: [2]
template:
  metadata:
    labels:
      {{- include "labels" . | nindent 6 }}
    annotations:
      checksum/config: {{ .Values.config | toJson | sha256sum }} # another configuration is another Job
  spec:
    restartPolicy: Never
    terminationGracePeriodSeconds: {{ .Values.stopSeconds }}
    {{- if gt (int .Values.machines) 1 }}
    subdomain: {{ include "service" . | quote }} # gives each pod a name that the others know
    {{- end }}
    automountServiceAccountToken: false
    enableServiceLinks: false
    shareProcessNamespace: true # an init process that passes on signals
    {{- with .Values.priorityClass }}
    priorityClassName: {{ . | quote }}
    {{- end }}
    {{- with .Values.image.pullSecret }}
    imagePullSecrets:
      - name: {{ . | quote }}
    {{- end }}
    {{- with .Values.nodeSelector }}
    nodeSelector:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with .Values.tolerations }}
    tolerations:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    securityContext:
      runAsNonRoot: true
      runAsUser: 10001
      runAsGroup: 10001
      fsGroup: 10001 # owns the volumes
      fsGroupChangePolicy: OnRootMismatch
      seccompProfile:
        type: RuntimeDefault
    containers:
      - name: train
        image: "{{ .Values.image.repository }}:{{ .Values.image.tag }}"
        imagePullPolicy: {{ .Values.image.pullPolicy }}
        command: {{ toJson .Values.command }}
        args: {{ toJson .Values.args }}
        {{- if or (gt (int .Values.machines) 1) (eq (int .Values.resources.gpus) 0) }}
        env:
          {{- if gt (int .Values.machines) 1 }}
          - name: MACHINES_SERVICE # launch.sh finds machine 0 by it
            value: {{ include "service" . | quote }}
          {{- end }}
          {{- if eq (int .Values.resources.gpus) 0 }}
          - name: OMP_NUM_THREADS # as many as the pod's share of the node
            value: {{ .Values.resources.cpus | quote }}
          {{- end }}
        {{- end }}
        envFrom: # keys of trackers and the like; README.md says how to make it
          - secretRef:
              name: {{ printf "%s-env" .Values.project | quote }}
              optional: true
        # No limit of the processor: it would slow down the loader processes when nobody else needs it.
        resources:
          requests:
            cpu: {{ .Values.resources.cpus | quote }}
            memory: {{ .Values.resources.memory }}
            {{- if .Values.resources.gpus }}
            nvidia.com/gpu: {{ .Values.resources.gpus }}
            {{- end }}
          limits:
            memory: {{ .Values.resources.memory }}
            {{- if .Values.resources.gpus }}
            nvidia.com/gpu: {{ .Values.resources.gpus }}
            {{- end }}
        securityContext:
          allowPrivilegeEscalation: false
          readOnlyRootFilesystem: true
          capabilities:
            drop: [ALL]
        volumeMounts:
          - name: config
            mountPath: /workspace/accelerate_config.yaml
            subPath: accelerate_config.yaml
            readOnly: true
          - name: config
            mountPath: /workspace/accelerate_config.cpu.yaml
            subPath: accelerate_config.cpu.yaml
            readOnly: true
          - name: checkpoints
            mountPath: /checkpoints
          - name: data
            mountPath: /data
            {{- if .Values.data.claim }}
            readOnly: true
            {{- end }}
          - name: shm
            mountPath: /dev/shm
          - name: cache
            mountPath: /cache
          - name: tmp
            mountPath: /tmp
    volumes:
      - name: config
        configMap:
          name: {{ printf "%s-config" .Release.Name | quote }}
      - name: checkpoints
        persistentVolumeClaim:
          claimName: {{ .Values.checkpoints.claim | quote }}
      - name: data
        {{- if .Values.data.claim }}
        persistentVolumeClaim:
          claimName: {{ .Values.data.claim | quote }}
          readOnly: true
        {{- else }}
        emptyDir: {}
        {{- end }}
      - name: shm # loader processes hand over batches through it; a container's own has 64 MB
        emptyDir:
          medium: Memory
          sizeLimit: {{ .Values.shmSize }}
      - name: cache
        emptyDir: {}
      - name: tmp
        emptyDir: {}
{{- end }}
