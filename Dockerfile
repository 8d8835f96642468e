# One image for every component: `emberscale`, the operator, and the master, parameter servers and workers of jobs.
#
#   docker build -t emberscale .
#   docker build -t emberscale --build-arg PIP_EXTRA_INDEX_URL=<index of CPU builds of torch> .
#   docker build -t emberscale-control-plane --build-arg EXTRAS=operator,brain .      operator and brain alone: no torch
#
# With an index or a folder (PIP_FIND_LINKS) of CPU builds the image is several GB smaller: pip prefers `2.x+cpu` to `2.x`.
# The base is any Debian with Python 3.11+, pip and venv; the installation lives in a virtual environment of its own.
ARG BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 \
    GRPC_VERBOSITY=ERROR \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore

# What the components need, in a layer that changes only when pyproject.toml's dependencies do.
FROM base AS requirements
ARG EXTRAS=local
WORKDIR /src
COPY pyproject.toml deploy/image/requirements_of.py ./
RUN python3 requirements_of.py "$EXTRAS" > requirements.txt

FROM base AS dependencies
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
WORKDIR /src
COPY constraints.txt ./
COPY --from=requirements /src/requirements.txt ./
# Headers, test binaries and test suites of libraries are of no use here; the shared-memory broker of torch is.
RUN python3 -m venv --without-pip /opt/emberscale \
    && python3 -m pip --python /opt/emberscale/bin/python install -r requirements.txt -c constraints.txt \
    && cd /opt/emberscale/lib/python3.*/site-packages \
    && rm -rf torch/include torch/test torch/share \
    && find . -path './torch/bin/*' -type f ! -name torch_shm_manager -delete \
    && find . -type d -name tests -path '*/tests' ! -path './torch/*' ! -path './numpy/*' -prune -exec rm -rf {} +

FROM base AS wheel
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
WORKDIR /src
COPY pyproject.toml README.md ./
COPY api api
COPY brain brain
COPY jobmaster jobmaster
COPY operator operator
COPY sdk sdk
COPY trainer trainer
RUN python3 -m pip wheel --no-deps --wheel-dir /wheels .

FROM base
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="Emberscale" \
      org.opencontainers.image.description="Elastic training of deep-learning recommendation models on parameter servers, in Kubernetes" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"

COPY --from=dependencies /opt/emberscale /opt/emberscale
COPY --from=wheel /wheels /tmp/wheels
COPY deploy/image/emberscale_kernel_cache.py /tmp/wheels/

# Kernels are compiled here, so that pods do not compile them at every start; then a tiny job proves the image. /tmp is
# all that a process must be able to write.
ENV EMBERSCALE_KERNELS=/opt/emberscale/kernels \
    NUMBA_CACHE_LOCATOR_CLASSES=emberscale_kernel_cache.SeededCacheLocator \
    NUMBA_CACHE_DIR=/tmp/numba \
    MPLCONFIGDIR=/tmp/matplotlib \
    HOME=/tmp
ARG EXTRAS=local
COPY deploy/image/first-job.yaml /tmp/job/
RUN python3 -m pip --python /opt/emberscale/bin/python install --no-deps --no-index /tmp/wheels/*.whl \
    && cp /tmp/wheels/emberscale_kernel_cache.py /opt/emberscale/lib/python3.*/site-packages/ \
    && mkdir -p $EMBERSCALE_KERNELS \
    && cd /tmp/job && export PATH=/opt/emberscale/bin:$PATH NUMBA_CACHE_DIR=$EMBERSCALE_KERNELS \
    && for component in $(echo $EXTRAS | tr , ' '); do case $component in \
         operator) python -c 'import emberscale_operator.__main__' ;; \
         jobmaster) python -c 'import emberscale_jobmaster.__main__' ;; \
         trainer) python -m emberscale_trainer.compile_kernels ;; \
         brain) python -c 'import emberscale_brain.__main__, emberscale_brain.planner.sieve' ;; \
         local) python -m emberscale_trainer.compile_kernels && python -c 'import emberscale_brain.planner.sieve' \
           && emberscale data synth data --rows 4000 --seed 1 \
           && (emberscale run first-job.yaml || (tail -n 50 runs/*/logs/*; false)) ;; \
         esac || exit 1; done \
    && chmod -R a+rX $EMBERSCALE_KERNELS \
    && cd / && rm -rf /tmp/*

RUN echo 'emberscale:x:65532:65532::/tmp:/usr/sbin/nologin' >> /etc/passwd && echo 'emberscale:x:65532:' >> /etc/group
ENV PATH=/opt/emberscale/bin:$PATH
USER 65532:65532
WORKDIR /tmp
CMD ["emberscale", "--help"]
