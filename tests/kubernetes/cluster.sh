#!/usr/bin/env bash
# Runs the end-to-end suite of tests/kubernetes on a cluster, with images built from the Dockerfiles of this checkout.
#
#   tests/kubernetes/cluster.sh [arguments of pytest]          (`make e2e` runs all of it)
#
# On a cluster of yours, with kubectl and helm on the path:
#   KUBECONFIG                 names it
#   EMBERSCALE_LOAD_COMMAND    loads an image archive into every node: it gets the archive, such as `kind load image-archive`
#   EMBERSCALE_BUILD_COMMAND   optional: builds an image; it gets the name, the archive to write, the folder with the
#                              Dockerfile, and more arguments such as `--build-arg EXTRAS=...`. Docker by default
#   EMBERSCALE_E2E_FOLDER      optional: a folder that all nodes share, for data and checkpoints
#   EMBERSCALE_E2E_AUDIT_LOG   optional: the API server's audit log; the test of the operator's rights needs it
#   EMBERSCALE_E2E_NODE_FAULT  optional: a command that does `N cut`, `N heal` or `N crash` to node N; node loss needs it
#   EMBERSCALE_E2E_FAKE_NODES  optional: a command that adds so many nodes whose pods only seem to run; the storm needs it
#   EMBERSCALE_E2E_KEEP        optional: leaves the installation there, for the next run
#   EMBERSCALE_E2E_PROCESSES   optional: how many processes run the tests that may run beside each other, 3 by default
# Otherwise, as root on Debian, a cluster of two nodes is started for the run from KUBE_SCRIPTS, a folder with up.sh,
# down.sh, build-image.sh, load-image.sh, node.sh and fake-nodes.sh; by default ../shared/kube beside this checkout.
# KUBE_VERSION is passed on.
#
# EMBERSCALE_CHAOS_ROUNDS says how many rounds of killing are played (6 by default, about 2 minutes; 20 take about 6 on two
# cores), EMBERSCALE_CHAOS_SEED repeats those of a run. EMBERSCALE_STORM_JOBS says how many jobs come at once (100 by
# default).
#
# Exit codes: pytest's; 77 where no cluster can be had: then nothing has been tested.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
scripts=${KUBE_SCRIPTS:-$root/../shared/kube}
packages=(containerd runc iptables containernetworking-plugins conntrack ethtool socat openssl iproute2 xz-utils buildah
  debootstrap prometheus)
work=$(mktemp -d)
state="" inside=""

end() {
  status=$?
  if [ -n "$state" ]; then
    [ "$status" = 0 ] || { cp -r "$state/logs" "$work-logs" && echo "logs of the cluster: $work-logs" >&2; }
    "$scripts/down.sh" "$state" || true
  fi
  rm -rf "$work" 2> /dev/null || true
  exit "$status"
}
trap end EXIT

step() {
  echo "$(date +%T) $1"
}

not_run() {
  echo "tests/kubernetes: NOT RUN, nothing was tested: $1" >&2
  exit 77
}

with_docker() { # NAME ARCHIVE FOLDER [more arguments of docker build]
  docker build --tag "$1" "${@:4}" "$3" && docker save --output "$2" "$1"
}

install_packages() {
  local missing=()
  for package in "${packages[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2> /dev/null | grep -q "install ok installed" || missing+=("$package")
  done
  [ ${#missing[@]} = 0 ] && return
  step "installing ${missing[*]}"
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" \
    > "$work/apt.log" 2>&1 || { tail -n 20 "$work/apt.log" >&2; return 1; }
}

start_cluster() {
  state=$work/cluster
  mkdir -p "$state/audit" "$work/scripts"
  cat > "$state/audit/policy.yaml" << 'POLICY'
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - {level: Metadata, userGroups: ["system:serviceaccounts"]}
  - {level: None}
POLICY
  # Nodes of one machine share /var/log/pods, where each kubelet removes the logs of pods that it does not know, and its
  # disk: once that is 85% full, each would remove the images that no pod uses at the moment, and none can be pulled.
  ln -s "$(cd "$scripts" && pwd)"/* "$work/scripts/"
  rm "$work/scripts/up.sh"
  sed "s|^volumePluginDir: .*|&\npodLogsDir: \$dir/pod-logs\nimageGCHighThresholdPercent: 100|" "$scripts/up.sh" > "$work/scripts/up.sh"
  chmod +x "$work/scripts/up.sh"
  APISERVER_EXTRA="--audit-policy-file=$state/audit/policy.yaml --audit-log-path=$state/audit/log.jsonl ${APISERVER_EXTRA:-}" \
    KUBE_NODES=2 "$work/scripts/up.sh" "$state" > "$work/up.log" 2>&1 || not_run "no cluster: $(tail -n 1 "$work/up.log")"
  # shellcheck source=/dev/null
  source "$state/env"
  inside=$KUBE_EXEC
  pods_run || not_run "no pod runs on the cluster that was started"
  export EMBERSCALE_E2E_AUDIT_LOG=$state/audit/log.jsonl
  export EMBERSCALE_E2E_NODE_FAULT=$scripts/node.sh EMBERSCALE_E2E_FAKE_NODES=$scripts/fake-nodes.sh
}

deliver() { # NAME IMAGE FOLDER [more arguments of the build]
  { $build "localhost/$2" "$work/$1.tar" "${@:3}" && $load "$work/$1.tar"; } > "$work/$1.log" 2>&1 \
    || { tail -n 60 "$work/$1.log" >&2; return 1; }
  rm "$work/$1.tar"
  step "$2 is loaded"
}

all_of() { # PID...
  local pid
  for pid in "$@"; do
    wait "$pid" || exit 1
  done
}

# conftest.py says what the parts are. The outcome is that of the first part that fails; 5 if no test is selected.
outcome=5
run_part() { # PART [arguments of pytest]
  local code=0
  step "running the tests of the part '$1'"
  $inside "$root/.venv/bin/pytest" tests/kubernetes --part "$@" || code=$?
  if [ "$code" != 5 ] && { [ "$outcome" = 5 ] || [ "$outcome" = 0 ]; }; then outcome=$code; fi
}

# Whether a pod without anything of ours comes to run; the account that it needs is made a moment after its namespace.
pods_run() {
  for _ in $(seq 30); do
    $inside kubectl run pods-run --image=local/pause:1 --image-pull-policy=Never --restart=Never > /dev/null 2>&1 && break
    sleep 1
  done
  $inside kubectl wait --for=condition=Ready pod/pods-run --timeout=90s > /dev/null 2>&1 \
    && $inside kubectl delete pod pods-run --wait=false > /dev/null
}

if [ -n "${EMBERSCALE_LOAD_COMMAND:-}" ] && [ -n "${KUBECONFIG:-}" ]; then
  own=yes build=${EMBERSCALE_BUILD_COMMAND:-with_docker} load=$EMBERSCALE_LOAD_COMMAND
elif [ ! -x "$scripts/up.sh" ]; then
  not_run "no cluster. Set KUBECONFIG and EMBERSCALE_LOAD_COMMAND; $0 says how"
elif [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
  not_run "starting a cluster takes root on Debian. Set KUBECONFIG and EMBERSCALE_LOAD_COMMAND; $0 says how"
else
  own="" build=$scripts/build-image.sh load=$scripts/load-image.sh
  install_packages || not_run "the packages that a cluster needs cannot be installed"
  step "making the base of the images"
  "$scripts/base-image.sh" > "$work/base.log" 2>&1 || not_run "no base of the images: $(tail -n 1 "$work/base.log")"
fi

if [ -z "$own" ]; then
  step "starting a cluster"
  start_cluster
fi

# Images are built and loaded beside each other and beside tests that do not need them.
step "building and loading the images"
deliver emberscale emberscale:e2e "$root" &
images=($!)
deliver control-plane emberscale-control-plane:e2e "$root" --build-arg EXTRAS=operator,brain &
images+=($!)
deliver redis redis:e2e tests/kubernetes/redis &
images+=($!)
run_part files "$@"
all_of "${images[@]}"
deliver next emberscale:next tests/kubernetes/next & # changes the image under test
images=($!)
deliver postgresql postgresql:e2e tests/kubernetes/postgresql &
images+=($!)

export EMBERSCALE_E2E_IMAGE=localhost/emberscale:e2e EMBERSCALE_E2E_REDIS_IMAGE=localhost/redis:e2e
export EMBERSCALE_E2E_CONTROL_PLANE_IMAGE=localhost/emberscale-control-plane:e2e
export EMBERSCALE_E2E_POSTGRESQL_IMAGE=localhost/postgresql:e2e EMBERSCALE_E2E_NEXT_IMAGE=localhost/emberscale:next
export EMBERSCALE_E2E_FOLDER=${EMBERSCALE_E2E_FOLDER:-$work/shared}
keep=${EMBERSCALE_E2E_KEEP:-${state:+yes}} # a cluster of ours goes as a whole
EMBERSCALE_E2E_KEEP=yes run_part together --numprocesses "${EMBERSCALE_E2E_PROCESSES:-3}" "$@"
all_of "${images[@]}"
EMBERSCALE_E2E_KEEP=$keep run_part alone "$@"
exit "$outcome"
