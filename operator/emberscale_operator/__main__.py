"""`python -m emberscale_operator`: runs TrainingJobs on the cluster that it is in, or that KUBECONFIG names.

It takes no arguments; the environment says the rest.

    EMBERSCALE_IMAGE               image of the jobs' pods; required
    EMBERSCALE_IMAGE_PULL_POLICY   of the jobs' pods: Always, IfNotPresent or Never; default IfNotPresent
    EMBERSCALE_IMAGE_PULL_SECRETS  names of Secrets in the jobs' namespaces, separated by commas
    EMBERSCALE_REDIS_URL           where the masters keep their state, with the password if there is one; required.
                                   It must resolve in the jobs' namespaces. Its user must be allowed to change users:
                                   each job gets one that reaches the job's keys, in a Secret for the job's master
    EMBERSCALE_FLASH_REDIS_URL     another Redis, for flash checkpoints, on the same terms; none by default
    EMBERSCALE_BRAIN_ADDRESS       host:port of the brain, given to the masters, and told which jobs are gone; none by
                                   default
    EMBERSCALE_BRAIN_TOKEN         the brain's token, required with its address; it signs a token for each job
    EMBERSCALE_BRAIN_CA            the authority of a brain that serves TLS, in PEM, given to the masters
    EMBERSCALE_JOB_TLS             true gives each job that is created from then on a certificate, and TLS between its
                                   processes and with the operator; default false
    EMBERSCALE_WATCH_NAMESPACES    namespaces to watch, separated by commas; empty watches the whole cluster
    EMBERSCALE_NAMESPACE           the operator's own namespace, where the lease is; required (downward API)
    EMBERSCALE_POD_NAME            who holds the lease; default the host's name (downward API)
    EMBERSCALE_LEASE_NAME          default emberscale-operator
    EMBERSCALE_CLUSTER_DOMAIN      default cluster.local
    EMBERSCALE_METRICS_PORT        /metrics, Prometheus; default 9090
    EMBERSCALE_HEALTH_PORT         /healthz and /readyz; they fail where a watch has missed a change for long, or a job
                                   has been reconciled for 5 minutes, and say so; default 8080
    EMBERSCALE_RESYNC              how often every job is reconciled without an event, such as 30s; default 30s
    EMBERSCALE_LOG_LEVEL           debug, info, warning or error; default info

The rights that it uses, in each watched namespace or in the cluster:

    emberscale.io      trainingjobs         list, watch, delete (spec.runPolicy.ttlAfterFinished)
                       trainingjobs/status  patch
    ""                 pods                 list, watch, create, delete
                       pods/resize          patch
                       secrets, services, configmaps  get, create
                       events               list (why a pod's volume cannot be mounted), create
    policy             poddisruptionbudgets  get, create, patch
    coordination.k8s.io leases              get, create, update; in its own namespace only

Pods of a job serve Prometheus metrics on the port named `metrics` (9090) and carry the labels emberscale.io/job-name,
emberscale.io/role (master, ps, worker), emberscale.io/index and app.kubernetes.io/{name,instance,component,part-of,
managed-by}. The master's Service `<job>-master` has the port `grpc` (7070).

Exit codes: 0 after SIGTERM, 2 for an environment that is wrong, 1 when the cluster cannot be reached.
"""

import sys

from emberscale_api.errors import InvalidError
from emberscale_operator.kubernetes.settings import read_settings


def main() -> None:
    """Runs until it is told to stop."""
    if len(sys.argv) > 1:
        print(__doc__)  # noqa: T201  # the help
        sys.exit(0 if sys.argv[1] in ("-h", "--help") else 2)
    try:
        settings = read_settings()
    except InvalidError as error:
        print(f"emberscale-operator: {error}", file=sys.stderr)  # noqa: T201  # before there is a log
        sys.exit(2)
    # kopf and the Kubernetes client take a second to import
    from emberscale_operator.kubernetes.operator import run

    sys.exit(run(settings))


if __name__ == "__main__":
    main()
