#!/usr/bin/env bash
# Runs the end-to-end suite of tests/kubernetes on a cluster, with images built from the Dockerfiles of this checkout.
#
#   tests/kubernetes/cluster.sh [arguments of pytest]          (`make e2e` runs all of it)
#   tests/kubernetes/cluster.sh --images                       only builds the large images; the next run reuses them
#   tests/kubernetes/cluster.sh --run PROGRAM [arguments]      runs a Python program there instead, such as a benchmark
#
# On your own cluster, the parts run one after the other. kubectl and helm have to be on the path. Variables:
#   KUBECONFIG                 the cluster
#   EMBERSCALE_LOAD_COMMAND    loads an image archive, its argument, into every node, such as `kind load image-archive`
#   EMBERSCALE_BUILD_COMMAND   optional: builds an image; its arguments are the name, the archive to write, the folder
#                              of the Dockerfile, and options such as `--build-arg EXTRAS=...`. Docker by default
#   EMBERSCALE_E2E_FOLDER      optional: a folder that all nodes share, for data and checkpoints
#   EMBERSCALE_E2E_AUDIT_LOG   optional: the API server's audit logs, separated by ":"; the test of the operator's
#                              rights needs them
#   EMBERSCALE_E2E_NODE_FAULT  optional: a command that does `N cut`, `N heal` or `N crash` to node N, for node loss
#   EMBERSCALE_E2E_FAKE_NODES  optional: a command that adds N nodes whose pods only seem to run, for the storm
#   EMBERSCALE_E2E_KEEP        optional: keeps the installation for the next run
#   EMBERSCALE_E2E_PROCESSES   optional: the number of processes that run the concurrent tests, 3 by default
# Otherwise, as root on Debian, the script starts a cluster of two nodes for the run. With four cores or more it starts
# two clusters, and `alone` runs beside `together` without slowing it; EMBERSCALE_E2E_CLUSTERS, 1 or 2, overrides the
# number. KUBE_SCRIPTS is a folder with up.sh, down.sh, base-image.sh, build-image.sh, load-image.sh, node.sh and
# fake-nodes.sh; by default ../shared/kube beside this checkout. KUBE_VERSION is passed on. KUBE_NETNS (kube by default)
# begins the names of the clusters' network namespaces.
#
# EMBERSCALE_CHAOS_ROUNDS is the number of rounds of killing (6 by default, about 2 minutes; 20 take about 6 on two
# cores). EMBERSCALE_CHAOS_SEED repeats the rounds of an earlier run. EMBERSCALE_STORM_JOBS is the number of jobs in the
# storm (100 by default). EMBERSCALE_E2E_NODES is the number of nodes of a cluster that the script starts (2 by
# default); the loss of two nodes at once takes 4.
#
# Exit codes: pytest's; 77 if there is no cluster, so that nothing was tested.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
scripts=${KUBE_SCRIPTS:-$root/../shared/kube}
packages=(containerd runc iptables containernetworking-plugins conntrack ethtool socat openssl iproute2 xz-utils buildah
  debootstrap prometheus)
work=$(mktemp -d)
begun=() started=() # the clusters of ours, by name; begun is also one that did not start

end() {
  status=$?
  # if the script is interrupted, tests would go on without their cluster
  # shellcheck disable=SC2046
  kill $(descendants $$) 2> /dev/null || true
  if [ "$status" != 0 ] && [ ${#begun[@]} != 0 ]; then
    mkdir -p "$work-logs"
    for name in "${begun[@]}"; do cp -r "$work/$name/logs" "$work-logs/$name" || true; done
    echo "logs of the clusters: $work-logs" >&2
  fi
  for name in "${begun[@]}"; do KUBE_NETNS=$(network_of "$name") "$scripts/down.sh" "$work/$name" || true; done
  rm -rf "$work" 2> /dev/null || true
  exit "$status"
}
trap end EXIT

descendants() { # PID
  local child
  for child in $(pgrep --parent "$1"); do echo "$child" && descendants "$child"; done
}

network_of() { # NAME
  echo "${KUBE_NETNS:-kube}-$1"
}

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

start_cluster() { # NAME
  local state=$work/$1
  mkdir -p "$state/audit"
  cat > "$state/audit/policy.yaml" << 'POLICY'
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - {level: Metadata, userGroups: ["system:serviceaccounts"]}
  - {level: None}
POLICY
  begun+=("$1")
  APISERVER_EXTRA="--audit-policy-file=$state/audit/policy.yaml --audit-log-path=$state/audit/log.jsonl ${APISERVER_EXTRA:-}" \
    KUBE_NODES=${EMBERSCALE_E2E_NODES:-2} KUBE_NETNS=$(network_of "$1") "$work/scripts/up.sh" "$state" > "$work/up.log" 2>&1 || return
  started+=("$1")
  on "$1" pods_run && return
  unset 'started[-1]'
  echo "no pod runs on it" > "$work/up.log"
  return 1
}

# Nodes on one machine share /var/log/pods and the disk. Each kubelet would remove the logs of pods that it does not
# know. Once the disk is 85% full, it would also remove images that no pod uses right now, which cannot be pulled again.
prepare_scripts() {
  mkdir "$work/scripts"
  ln -s "$(cd "$scripts" && pwd)"/* "$work/scripts/"
  rm "$work/scripts/up.sh"
  sed "s|^volumePluginDir: .*|&\npodLogsDir: \$dir/pod-logs\nimageGCHighThresholdPercent: 100|" "$scripts/up.sh" > "$work/scripts/up.sh"
  chmod +x "$work/scripts/up.sh"
}

# Runs a command in a subshell, with the environment of one of the script's clusters; unchanged on your own cluster.
on() ( # CLUSTER COMMAND...
  if [ ${#started[@]} != 0 ]; then
    # shellcheck source=/dev/null
    source "$work/$1/env"
    export EMBERSCALE_E2E_NODE_FAULT=$scripts/node.sh EMBERSCALE_E2E_FAKE_NODES=$scripts/fake-nodes.sh
  fi
  export EMBERSCALE_E2E_FOLDER=${EMBERSCALE_E2E_FOLDER:-$work/${started[0]:+$1/}shared}
  "${@:2}"
)

# Builds an image once and loads it; CLUSTERS is the command that runs the load: `on_each`, or `on NAME`.
deliver() { # CLUSTERS NAME IMAGE FOLDER [more arguments of the build]
  { $build "localhost/$3" "$work/$2.tar" "${@:4}" && $1 $load "$work/$2.tar"; } > "$work/$2.log" 2>&1 \
    || { tail -n 60 "$work/$2.log" >&2; return 1; }
  rm "$work/$2.tar"
  step "$3 is loaded"
}

on_each() { # COMMAND...
  for cluster in "${started[@]:-yours}"; do on "$cluster" "$@" || return; done
}

all_of() { # PID...
  local pid
  for pid in "$@"; do
    wait "$pid" || exit 1
  done
}

# conftest.py describes the parts.
part() { # PART [arguments of pytest]
  step "running the tests of the part '$1'"
  ${KUBE_EXEC:-} "$root/.venv/bin/pytest" tests/kubernetes --part "$@" 2>&1 | sed --unbuffered "s/^/$1 | /"
}

run_program() { # PROGRAM [arguments]
  PYTHONPATH=$root/tests/support${PYTHONPATH:+:$PYTHONPATH} ${KUBE_EXEC:-} "$root/.venv/bin/python" "$@"
}

selects() { # PART [arguments of pytest]
  "$root/.venv/bin/pytest" tests/kubernetes --collect-only -qq --part "$@" > /dev/null 2>&1
}

# The outcome is that of the first part that fails; 5 if no test is selected.
outcome=5
after() { # COMMAND...
  local code=0
  "$@" || code=$?
  if [ "$code" != 5 ] && { [ "$outcome" = 5 ] || [ "$outcome" = 0 ]; }; then outcome=$code; fi
}

# Whether a plain pod runs at all. Retries, since the service account appears a moment after its namespace.
pods_run() {
  for _ in $(seq 30); do
    $KUBE_EXEC kubectl run pods-run --image=local/pause:1 --image-pull-policy=Never --restart=Never > /dev/null 2>&1 && break
    sleep 1
  done
  $KUBE_EXEC kubectl wait --for=condition=Ready pod/pods-run --timeout=90s > /dev/null 2>&1 \
    && $KUBE_EXEC kubectl delete pod pods-run --wait=false > /dev/null
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

images_only=""
if [ "${1:-}" = --images ]; then images_only=yes own=yes load=true; fi
program=""
if [ "${1:-}" = --run ]; then
  [ -n "${2:-}" ] || { echo "usage: $0 --run PROGRAM [arguments]" >&2; exit 2; }
  program=yes EMBERSCALE_E2E_CLUSTERS=1
  shift
fi
clusters=${EMBERSCALE_E2E_CLUSTERS:-$(($(nproc) < 4 ? 1 : 2))} apart=yours
if [ -z "$own" ]; then
  step "starting a cluster, or two"
  prepare_scripts
  start_cluster together || not_run "no cluster: $(tail -n 1 "$work/up.log")"
  apart=together # where the tests of `alone` run
  if [ "$clusters" = 2 ] && selects alone "$@"; then
    if start_cluster alone; then
      apart=alone
    else
      step "no second cluster: $(tail -n 1 "$work/up.log"); 'alone' follows 'together'"
    fi
  fi
  for name in "${started[@]}"; do audited="${audited:-}${audited:+:}$work/$name/audit/log.jsonl"; done
  export EMBERSCALE_E2E_AUDIT_LOG=${audited:-}
fi

# Images are built and loaded in parallel, while the tests run that do not need them.
step "building and loading the images"
deliver on_each emberscale emberscale:e2e "$root" &
images=($!)
deliver on_each control-plane emberscale-control-plane:e2e "$root" --build-arg EXTRAS=operator,brain &
images+=($!)
if [ -n "$images_only" ]; then
  all_of "${images[@]}"
  exit
fi
deliver on_each redis redis:e2e tests/kubernetes/redis &
images+=($!)
[ -n "$program" ] || after on together part files "$@"
all_of "${images[@]}"

export EMBERSCALE_E2E_IMAGE=localhost/emberscale:e2e EMBERSCALE_E2E_REDIS_IMAGE=localhost/redis:e2e
export EMBERSCALE_E2E_CONTROL_PLANE_IMAGE=localhost/emberscale-control-plane:e2e
export EMBERSCALE_E2E_POSTGRESQL_IMAGE=localhost/postgresql:e2e EMBERSCALE_E2E_NEXT_IMAGE=localhost/emberscale:next
keep=${EMBERSCALE_E2E_KEEP:-${started[0]:+yes}} # clusters of ours go as a whole
export EMBERSCALE_E2E_KEEP=yes

part_together() {
  after on together part together --numprocesses "${EMBERSCALE_E2E_PROCESSES:-3}" "$@"
  after on together part after_together "$@"
}
deliver_rest() { # what only tests of `alone` need
  deliver "on $apart" next emberscale:next tests/kubernetes/next || return # changes the image under test
  deliver_postgresql
}
deliver_postgresql() {
  deliver "on $apart" postgresql postgresql:e2e tests/kubernetes/postgresql
}
if [ -n "$program" ]; then
  deliver_postgresql
  step "running $1"
  EMBERSCALE_E2E_KEEP=$keep on together run_program "$@"
  exit
fi
if [ "$apart" = alone ]; then
  { deliver_rest && on alone part alone "$@"; } &
  beside=$!
  part_together "$@"
  after wait $beside
else
  deliver_rest &
  beside=$!
  part_together "$@"
  all_of $beside
  after on "$apart" part alone "$@"
fi
EMBERSCALE_E2E_KEEP=$keep after on "$apart" part after_all "$@"
exit "$outcome"
