#!/usr/bin/env bash
# On a machine with a GPU: checks the kernels' values, times them and whole steps, prints a table. Under 8 minutes.
#
#   benchmarks/gpu/run.sh [--dry] [PART…]     parts: values decode chunk step pair; without one, all of them
#
# PYTHON names an interpreter with torch (CUDA), triton, numpy, safetensors, xxhash, msgspec, pytest, hypothesis
# and transformers; default: .venv's, else python3. Lines of JSON go to $OUT/gpu.jsonl (OUT: default a new
# folder), the rest to $OUT/PART.log. Each part has its own limit, and those after a failed one run all the same.
# --dry: the same at tiny sizes, on a CPU, in Triton's interpreter.
set -uo pipefail
cd "$(dirname "$0")/../.."

dry=()
parts=()
for word in "$@"; do
  if [ "$word" = --dry ]; then dry=(--dry); else parts+=("$word"); fi
done
[ ${#parts[@]} -gt 0 ] || parts=(values decode chunk step pair)
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
OUT=${OUT:-$(mktemp -d)}
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
: >"$OUT/gpu.jsonl"
if [ ${#dry[@]} -gt 0 ]; then
  export TRITON_INTERPRET=1
else
  unset TRITON_INTERPRET
  nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader || true
fi
"$PYTHON" -c 'import sys, torch, triton; print("python", sys.version.split()[0], "torch", torch.__version__, "triton", triton.__version__)' || exit 1

failed=()
part() {
  local name=$1 limit=$2 from=$SECONDS
  shift 2
  timeout --kill-after=10 "$limit" "$@" >"$OUT/$name.out" 2>"$OUT/$name.log"
  local code=$?
  grep '^{' "$OUT/$name.out" >>"$OUT/gpu.jsonl"
  grep '^{' "$OUT/$name.out"
  if [ $code -eq 0 ]; then
    echo "== $name: ok, $((SECONDS - from)) s"
  else
    echo "== $name: FAILED with $code after $((SECONDS - from)) s; the end of its words:"
    tail -n 15 "$OUT/$name.out" "$OUT/$name.log" | cut -c1-300
    failed+=("$name")
  fi
}

values() {
  local tests=(tests/kernels tests/gpu tests/engine/test_triton_text.py tests/engine/test_memory.py)
  local options=(-q --maxfail=20 -p no:cacheprovider -W default)
  if [ ${#dry[@]} -gt 0 ]; then
    tests=("tests/kernels/test_row_kernels.py::test_nothing_to_do_is_done_at_once")
  else
    options+=(--full)
    "$PYTHON" -c 'import xdist' 2>/dev/null && options+=(-n 8)
  fi
  part values 170 "$PYTHON" -m pytest "${options[@]}" "${tests[@]}"
  tail -n 3 "$OUT/values.out"
}

for name in "${parts[@]}"; do
  case $name in
    values) values ;;
    decode | chunk) part "$name" 60 "$PYTHON" -m benchmarks.gpu.attention "$name" "${dry[@]}" ;;
    step) part step 100 "$PYTHON" -m benchmarks.gpu.step "${dry[@]}" ;;
    pair) part pair 80 "$PYTHON" -m benchmarks.gpu.pair "${dry[@]}" ;;
    *) echo "no part $name: values, decode, chunk, step, pair"; exit 2 ;;
  esac
done

echo
"$PYTHON" -m benchmarks.gpu.table <"$OUT/gpu.jsonl"
echo "all of it: $OUT, after $SECONDS s"
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
