#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# gpu_run.sh test|bench [PYTHON] [pytest options]: what `make test-gpu` and `make bench-gpu` do, for machines without make too.
# The environment is build/gpu-venv, on top of what PYTHON has installed (tools/gpu_venv.sh). Results are left in build/gpu.
set -euo pipefail
cd "$(dirname "$0")/.."
what=$1 python=${2:-python3}
shift $(($# < 2 ? $# : 2))
bin=$PWD/build/gpu-venv/bin
carried=(build/gpu-carry/*)

if [[ ! -e build/gpu-venv/.stamp || ${carried[0]} -nt build/gpu-venv/.stamp ]]; then
  tools/gpu_venv.sh "$python"
fi
mkdir -p build/gpu
PYTHONPATH=tests "$bin/python" -m harness.gpu

case $what in
  test)
    status=0
    "$bin/python" -m pytest tests/gpu --keep-going --budget 420 --report build/gpu/tests.json \
      -W default --inner=-Wdefault "$@" || status=$?
    cat build/gpu/tests.md
    exit "$status"
    ;;
  bench)
    {
      status=0
      PYTHONPATH=tests "$bin/python" -m harness.gpu
      for script in moves step training memory; do
        echo "## benchmarks/gpu_$script.py"
        timeout 110 "$bin/python" "benchmarks/gpu_$script.py" --json "build/gpu/$script.json" || {
          status=1
          echo "## failed"
        }
      done
      exit "$status"
    } 2>&1 | tee build/gpu/bench.txt
    ;;
esac
