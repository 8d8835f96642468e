#!/usr/bin/env bash
# Runs the end-to-end suite of tests/kubernetes on a cluster, with the image built from the Dockerfile.
#
#   tests/kubernetes/cluster.sh [arguments of pytest]
#
# On a cluster of yours:
#   KUBECONFIG                 names it
#   EMBERSCALE_BUILD_COMMAND   builds an image: it gets the name, the archive to write and the context folder as arguments
#   EMBERSCALE_LOAD_COMMAND    loads an image archive into every node: it gets the archive, such as `kind load image-archive`
#   EMBERSCALE_E2E_FOLDER      a folder that all nodes share, for data and checkpoints
#   EMBERSCALE_E2E_AUDIT_LOG   optional: the API server's audit log; the test of the operator's rights needs it
#   EMBERSCALE_E2E_NODE_FAULT  optional: does `N cut`, `N heal` or `N crash` to node N; tests of node loss need it
# Otherwise, as root on Debian, a cluster is started for the run from KUBE_SCRIPTS, a folder with up.sh, down.sh, build-image.sh,
# load-image.sh and node.sh; by default ../shared/kube beside this checkout. KUBE_VERSION and KUBE_STATE are passed on.
#
# Exit codes: pytest's; 77 where no cluster can be had: then nothing has been tested.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
scripts=${KUBE_SCRIPTS:-$root/../shared/kube}
images=$(mktemp -d)
state=""

end() {
  status=$?
  if [ -n "$state" ]; then
    [ "$status" = 0 ] || KEEP_LOGS=1
    [ -z "${KEEP_LOGS:-}" ] || echo "logs of the cluster: $state/logs" >&2
    "$scripts/down.sh" "$state"
  fi
  rm -rf "$images"
  exit "$status"
}
trap end EXIT

build=${EMBERSCALE_BUILD_COMMAND:-}
load=${EMBERSCALE_LOAD_COMMAND:-}
inside=""
if [ -n "$load" ] && [ -n "${KUBECONFIG:-}" ] && [ -n "$build" ]; then
  :
elif [ -x "$scripts/up.sh" ] && [ "$(id -u)" = 0 ] && command -v containerd > /dev/null && command -v buildah > /dev/null; then
  build=$scripts/build-image.sh load=$scripts/load-image.sh
else
  echo "tests/kubernetes: NOT RUN: no cluster. Set KUBECONFIG, EMBERSCALE_BUILD_COMMAND and EMBERSCALE_LOAD_COMMAND ($0 says how)." >&2
  exit 77
fi

$build localhost/emberscale:e2e "$images/emberscale.tar" "$root"
$build localhost/redis:e2e "$images/redis.tar" tests/kubernetes/redis
if [ "$build" = "$scripts/build-image.sh" ]; then
  state=${KUBE_STATE:-$(mktemp -d)}
  audit=$state/audit
  mkdir -p "$audit"
  cat > "$audit/policy.yaml" << 'POLICY'
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
POLICY
  export APISERVER_EXTRA="--audit-policy-file=$audit/policy.yaml --audit-log-path=$audit/log.jsonl ${APISERVER_EXTRA:-}"
  KUBE_NODES=2 "$scripts/up.sh" "$state"
  export EMBERSCALE_E2E_AUDIT_LOG=$audit/log.jsonl
  # shellcheck source=/dev/null
  source "$state/env"
  inside=$KUBE_EXEC
  export EMBERSCALE_E2E_NODE_FAULT=$scripts/node.sh
fi
$load "$images/emberscale.tar"
$load "$images/redis.tar"

export EMBERSCALE_E2E_IMAGE=localhost/emberscale:e2e EMBERSCALE_E2E_REDIS_IMAGE=localhost/redis:e2e
export EMBERSCALE_E2E_FOLDER=${EMBERSCALE_E2E_FOLDER:-$images/shared}
$inside "$root/.venv/bin/pytest" tests/kubernetes "$@"
