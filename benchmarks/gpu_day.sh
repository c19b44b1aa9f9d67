#!/usr/bin/env bash
# What one GPU can prove in half an hour, in five calls of less than ten minutes:
#   bash benchmarks/gpu_day.sh CALL DATA OUTPUT [DEVICE]
# CALL is 1 to 5. DATA is a folder of data sets, results/data, with digits; without cifar10 in it,
# calls 3 to 5 leave out what needs it. Each check prints a line, and writes it to OUTPUT/day.jsonl.
# DEVICE is cuda; with cpu this is a rehearsal. Needs no network and no Snakemake; WHEELS, a folder of
# wheels, has what the Python lacks of jsonschema, jsonschema-specifications, referencing, rpds-py
# and py-spy.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p "$3"
if [ -n "${WHEELS:-}" ]; then
  "${PYTHON:-python3}" -m pip install --quiet --no-index --no-deps --target "$3/packages" "$WHEELS"/*.whl
  export PYTHONPATH="$3/packages${PYTHONPATH:+:$PYTHONPATH}" PATH="$3/packages/bin:$PATH"
fi
exec "${PYTHON:-python3}" benchmarks/gpu_day.py "$1" "$2" "$3" --device "${4:-cuda}"
