#!/usr/bin/env bash
# Runs everything that needs a GPU, from a bundle or a build folder: one line per program, a summary.
#
# Usage: run_gpu_tests [--quick] [--sanitize] [--only WORD] [--logs FOLDER]
#   --quick     fewer stress steps, no sanitizer
#   --sanitize  only compute-sanitizer: memcheck, racecheck and initcheck on small shapes
#   --only WORD only lines whose name contains WORD
# Lines say PASS, FAIL or SKIP with the reason; whole outputs are in FOLDER (a new temporary one).
# Exit code 1 when anything failed, 2 when nothing ran. The libraries of CUDA and NCCL must be found
# where the bundle does not bring them (LD_LIBRARY_PATH).
set -uo pipefail
here="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)"

bin="$here/bin" tests="$here/bin"  # a bundle
if [[ ! -d "$bin" ]]; then         # the tree
  bin="$here/../../build/release" tests="$here/../../build/release/tests"
fi

# transport VARIABLES...: forms a group of two daemons with these variables ("{slot}" becomes the
# slot), and compares the way that it tells with the way that NCCL says it took.
transport() {
  local folder slot host hosts=() daemons=() variables told want took
  folder="$(mktemp -d)"
  trap 'kill "${daemons[@]}" 2> /dev/null; wait; rm -rf "$folder"' RETURN
  for slot in 0 1; do
    variables=("${@//"{slot}"/$slot}" NCCL_DEBUG=INFO "NCCL_DEBUG_FILE=$folder/nccl.$slot")
    env "${variables[@]}" "$bin/expertd" --listen 127.0.0.1:0 --slot "$slot" --device "cuda:$slot" \
      > "$folder/out.$slot" 2> "$folder/err.$slot" &
    daemons+=($!)
  done
  for slot in 0 1; do
    for _ in {1..300}; do
      host="$(sed -n 's/^listening .*\baddress=\([^ ]*\).*/\1/p' "$folder/out.$slot" | head -n 1)"
      [[ -z "$host" ]] || break
      sleep 0.1
    done
    [[ -n "$host" ]] || { cat "$folder"/err.* && return 1; }
    hosts+=("$host")
  done
  hosts=("--hosts=${hosts[0]},${hosts[1]}")
  "$bin/expertctl" up "${hosts[@]}" --backend nccl && "$bin/expertctl" doctor "${hosts[@]}" || return 1
  told="$("$bin/expertctl" describe "${hosts[@]}" | sed -n 's/^rank 0 reaches 1 by //p')"
  case "$told" in
    "nvlink p2p" | "p2p pcie") want="P2P" ;;
    shm) want="SHM" ;;
    network) want="NET" ;;
    *) want="something else" ;;
  esac
  took="$(cat "$folder"/nccl.* | grep -oE ' via (P2P|SHM|NET)/' | sed 's|.* \(.*\)/|\1|' | sort -u | tr '\n' ' ')"
  echo "told: $told; NCCL took: $took"
  [[ "$took" == "$want " ]] || return 1
  echo "[  PASSED  ] 1 test."
}

if [[ "${1:-}" == "--transport" ]]; then
  shift
  transport "$@"
  exit
fi

quick=0 sanitize=0 only="" logs=""
while (($#)); do
  case "$1" in
    --quick) quick=1 ;;
    --sanitize) sanitize=1 ;;
    --only) only="${2:?--only needs a word}" && shift ;;
    --logs) logs="${2:?--logs needs a folder}" && shift ;;
    *) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2 && exit 64 ;;
  esac
  shift
done
[[ -n "$logs" ]] || logs="$(mktemp -d)"
mkdir -p "$logs"
export EXPERTD_BIN_DIR="$bin"
# Multicast objects outlive a killed process on some hosts; nothing here needs them.
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
gpus="$( (nvidia-smi -L 2> /dev/null || true) | grep -c '^GPU' || true)"
passed=0 failed=0 skipped=0

line() { printf '%-4s %-34s %s\n' "$1" "$2" "$3"; }

# run NAME GPUS_NEEDED COMMAND...: one line. A GoogleTest program must have run at least one test.
run() {
  local name="$1" need="$2" log start="$SECONDS" code counted
  shift 2
  [[ "$name" == *"$only"* ]] || return 0
  if ((gpus < need)); then
    skipped=$((skipped + 1))
    line SKIP "$name" "needs $need GPUs, this machine has $gpus"
    return 0
  fi
  log="$logs/${name//[^a-zA-Z0-9_]/_}.log"
  timeout "${EXPERTD_TEST_TIMEOUT:-900}" "$@" > "$log" 2>&1 < /dev/null
  code=$?
  counted="$(sed -n 's/^\[  PASSED  \] \([0-9]*\) tests\{0,1\}\.$/\1/p' "$log" | tail -n 1)"
  if ((code == 0)) && ((${counted:-0} > 0)); then
    passed=$((passed + 1))
    line PASS "$name" "$counted tests, $((SECONDS - start)) s"
    return 0
  fi
  failed=$((failed + 1))
  line FAIL "$name" "exit code $code after $((SECONDS - start)) s: $log"
  grep -aE '^\[  FAILED  \] [^0-9]|Failure$|ERROR SUMMARY|^========= (Invalid|Error|Race|Uninit)|error while loading' "$log" |
    sort -u | head -n 8 | sed 's/^/       /'
  return 0
}

service() {  # NAME SHAPE FILTER
  local world="${2##*_}"
  run "$1" "$world" env "EXPERTD_TEST_SHAPES=$2" "$tests/conformance_service_test" --gtest_brief=1 \
    "--gtest_filter=$3"
}

# Everything of ours once, at sizes that a checker with a hundredfold cost gets through. Races are
# looked for in our own kernels only: cuBLAS's take very long.
small='Gpu/EpData*:*Router*:*Optim*:CudaDevice.Copies*:CudaDevice.Facts*'
declare -A checked=([memcheck]="$small:ExpertMlp*:WavesGpu*" [racecheck]="$small"
  [initcheck]="$small:ExpertMlp*:WavesGpu*")
sanitized() {
  local tool
  if ! command -v compute-sanitizer > /dev/null; then
    skipped=$((skipped + 1))
    line SKIP "sanitizer" "there is no compute-sanitizer here"
    return
  fi
  for tool in memcheck racecheck initcheck; do
    run "sanitizer $tool" 1 compute-sanitizer --tool "$tool" --error-exitcode 99 --print-limit 20 \
      "$tests/kernels_cuda_gpu_test" --gtest_brief=1 "--gtest_filter=${checked[$tool]}:-*Large*:*Steady*"
  done
}

line GPUS "$gpus" "$( (nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null || true) | sort | uniq -c | tr '\n' ';')"
if ((!sanitize)); then
  for program in "$tests"/*_gpu_test; do
    [[ -x "$program" ]] && run "${program##*/}" 1 "$program" --gtest_brief=1
  done
  for program in "$tests"/*_multigpu_test; do
    [[ -x "$program" ]] && run "${program##*/}" 2 "$program" --gtest_brief=1
  done
  self="$(readlink -f "${BASH_SOURCE[0]}")"
  run "transport" 2 "$self" --transport NCCL_P2P_DISABLE=0
  run "transport without peer access" 2 "$self" --transport NCCL_P2P_DISABLE=1
  run "transport, two hosts pretended" 2 "$self" --transport "NCCL_HOSTID=test-host-{slot}"
  calm='*-*RandomSizeAndDelay*'
  service "service, 1 GPU" nccl_1 "$calm"
  service "service, 2 GPUs" nccl_2 "$calm"
  service "service, two hosts pretended" nccl_network_2 "$calm"
  export EXPERTD_TEST_STEPS=$((quick ? 200 : 2000))
  service "stress, 2 GPUs, $EXPERTD_TEST_STEPS steps" nccl_2 '*RandomSizeAndDelay*'
  unset EXPERTD_TEST_STEPS
fi
((quick)) || sanitized
echo "$passed passed, $failed failed, $skipped skipped; logs in $logs"
((failed == 0)) || exit 1
((passed > 0)) || exit 2
