#!/usr/bin/env bash
# Fuzzes one target for a while: tests/fuzz/run.sh NAME SECONDS [CORPUS]
#
# Builds build/fuzz/NAME with clang's fuzzer and its address and undefined behaviour sanitizers from
# the sources that the target needs, runs it on a copy of tests/fuzz/corpus/NAME, or on the folder
# CORPUS, which it then adds to, and prints how much of those sources was covered. What it finds is
# left in build/fuzz/NAME-findings. Needs Debian's clang-14, llvm-14 and libclang-rt-14-dev.
set -euo pipefail
cd "$(dirname "$0")/../.."

targets="$(cd tests/fuzz && ls ./*_fuzz.cc | sed 's:./\(.*\)_fuzz.cc:\1:' | tr '\n' ' ')"
if (($# < 2)) || [[ ! -e "tests/fuzz/$1_fuzz.cc" ]]; then
  printf 'usage: %s NAME SECONDS [CORPUS]; NAME is one of %s\n' "$0" "$targets" >&2
  exit 2
fi
name="$1" seconds="$2"

tool() { command -v "$1-14" || command -v "$1" || true; }
clang="$(tool clang++)" profdata="$(tool llvm-profdata)" cov="$(tool llvm-cov)"
[[ -n "$clang" ]] || { echo "run.sh: needs clang++: apt-get install clang-14 libclang-rt-14-dev" >&2; exit 1; }

base=(base/error.cc base/ids.cc base/memory_plan.cc base/log.cc)
engine=(server/engine/{arrival,config,config_validation,group_state,join,operations,sequence}.cc)
sources=("${base[@]}" "${engine[@]}")
packages=(absl_statusor absl_strings absl_synchronization absl_cord absl_random_random)
libraries=(-lcrypto -lpthread)
includes=(-I.)
protos=()
case "$name" in
  request) sources+=(server/rpc/convert_*.cc server/engine/sharding.cc)
    protos=(types control_service layer_service peer_service step_service tensor_service) ;;
  server_config) sources+=(server/{config,config_source,exit_code,observe/listen_address}.cc)
    protos=(server_config) ;;
esac

out=build/fuzz
mkdir -p "$out/gen" "$out/objects"
if ((${#protos[@]})); then
  googleapis="${EXPERTD_GOOGLEAPIS_DIR:-build/deps/googleapis}"
  protoc -I proto -I "$googleapis" "--cpp_out=$out/gen" proto/expertd/v1/*.proto
  includes+=(-isystem "$out/gen")
  for proto in "${protos[@]}"; do sources+=("$out/gen/expertd/v1/$proto.pb.cc"); done
  packages+=(protobuf absl_flags absl_flags_parse)
fi

flags=(-std=c++20 -O1 -g1 -fno-omit-frame-pointer -fno-sanitize-recover=undefined
  -fsanitize=fuzzer,address,undefined -fprofile-instr-generate -fcoverage-mapping -w)
objects=()
for source in "${sources[@]}" "tests/fuzz/${name}_fuzz.cc"; do
  object="$out/objects/$(tr / _ <<< "$source").o"
  objects+=("$object")
  printf '%s\0%s\0' "$source" "$object"
done > "$out/objects/$name.list"
compile() { [[ "$2" -nt "$1" ]] || "${@:3}" -c "$1" -o "$2"; }
export -f compile
xargs -0 -n 2 -P "$(nproc)" bash -c 'compile "$2" "$3" $1' bash \
  "$clang ${flags[*]} ${includes[*]} -DGTEST_HAS_ABSL=0" < "$out/objects/$name.list"
# shellcheck disable=SC2046  # pkg-config prints words
"$clang" "${flags[@]}" -o "$out/$name" "${objects[@]}" $(pkg-config --libs "${packages[@]}") \
  "${libraries[@]}"

corpus="${3:-$out/$name-corpus}"
mkdir -p "$corpus" "$out/$name-findings"
cp -n "tests/fuzz/corpus/$name/"* "$corpus/"
status=0
LLVM_PROFILE_FILE="$out/$name.profraw" "$out/$name" -max_total_time="$seconds" -max_len=4096 \
  -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix="$out/$name-findings/" \
  "$corpus" || status=$?

if [[ -n "$profdata" && -n "$cov" && -e "$out/$name.profraw" ]]; then
  "$profdata" merge -sparse "$out/$name.profraw" -o "$out/$name.profdata"
  "$cov" report "$out/$name" "-instr-profile=$out/$name.profdata" \
    -ignore-filename-regex='(/usr/|build/fuzz/gen|tests/)' | cut -c 1-100 | awk '$4 != "0.00%"'
fi
exit "$status"
