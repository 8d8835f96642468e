#!/usr/bin/env bash
# Builds what a release consists of into dist/: the wheel, the chart, and the list of components (SBOM, CycloneDX) of the
# environment that the tests ran in. The image is built from the same commit; the last line says how.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
for place in "charts/emberscale/Chart.yaml:version: $version" "charts/emberscale/Chart.yaml:appVersion: $version" \
             "Dockerfile:ARG VERSION=$version" "CHANGELOG.md:## $version"; do
    grep -qF -- "${place#*:}" "${place%%:*}" || { echo "${place%%:*} lacks '${place#*:}': pyproject.toml says $version" >&2; exit 1; }
done
[ -z "$(git status --porcelain)" ] || { echo "commit first: a release is built from a commit" >&2; exit 1; }
command -v helm > /dev/null || { echo "helm is needed to package the chart" >&2; exit 1; }
mkdir -p dist
.venv/bin/pip wheel --quiet --no-deps --wheel-dir dist .
helm package charts/emberscale --destination dist > /dev/null
.venv/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON \
    --output-file "dist/emberscale-$version.sbom.json" .venv
(cd dist && sha256sum "emberscale-$version"* > "emberscale-$version.sha256")
ls dist
echo "image: docker build --build-arg VERSION=$version --tag emberscale:$version ."
