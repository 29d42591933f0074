#!/usr/bin/env bash
# Carries out the Dockerfile's steps in debootstrap roots, then starts the daemon as the image would.
#
# Usage: dockerfile_replay.sh [--keep]. Needs root and debootstrap; takes as long as a clean build.
# Each stage is a Debian bookworm root in a temporary folder, with this machine's apt sources, apt
# and pip configuration, certificates and name resolution. FROM, WORKDIR, COPY, RUN, ENV, USER,
# EXPOSE and ENTRYPOINT are understood; any other instruction is an error. Ends with PASS or a reason.
set -euo pipefail
source_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
work="$(mktemp -d "${TMPDIR:-/var/tmp}/expertd_image.XXXXXX")"
keep=0
[[ "${1:-}" != "--keep" ]] || keep=1
daemon_pid=""
mounted=()

die() {
  printf 'dockerfile_replay: %s\n' "$*" >&2
  exit 1
}

clean_up() {
  [[ -z "$daemon_pid" ]] || { kill "$daemon_pid" 2> /dev/null && wait "$daemon_pid" 2> /dev/null; } || true
  local at
  for at in "${mounted[@]}"; do umount -l "$at" || true; done
  if ((keep)); then
    echo "kept: $work"
  elif ! grep -q " $work/" /proc/mounts; then
    rm -rf --one-file-system "$work"
  fi
}
trap clean_up EXIT
trap 'echo "dockerfile_replay: failed at line $LINENO" >&2' ERR
trap 'exit 130' INT TERM

((EUID == 0)) || die "needs root, for debootstrap and chroot"
command -v debootstrap > /dev/null || die "needs debootstrap: apt-get install debootstrap"

# A bookworm root like debian:12-slim, made once and copied for every stage.
make_base() {
  local base="$work/base" mirror
  mirror="$(grep -rhoE '^(URIs:|deb) +https?://[^ ]*debian/?( |$)' /etc/apt/sources.list /etc/apt/sources.list.d 2> /dev/null |
    grep -oE 'https?://[^ ]+' | head -n 1 || true)"
  [[ -n "$mirror" ]] || die "no Debian archive in this machine's apt sources"
  echo "== debootstrap bookworm"
  debootstrap --variant=minbase bookworm "$base" "$mirror" > "$work/debootstrap.log" 2>&1 ||
    die "debootstrap failed: $(tail -n 1 "$work/debootstrap.log")"
  rm -f "$base/etc/apt/sources.list"
  local file
  for file in /etc/apt/sources.list /etc/apt/sources.list.d/*; do
    # Only Debian's own archives: other vendors' need keys that a fresh root does not have.
    if [[ -f "$file" ]] && grep -qE 'https?://[^ ]*/debian' "$file"; then
      install -D -m 644 "$file" "$base$file"
    fi
  done
  for file in /etc/apt/apt.conf.d/*; do
    if grep -qiE 'proxy|Verify-Peer|CaInfo' "$file"; then install -m 644 "$file" "$base$file"; fi
  done
  for file in /etc/resolv.conf /etc/hosts /etc/pip.conf; do
    [[ ! -f "$file" ]] || install -D -m 644 "$(readlink -f "$file")" "$base$file"
  done
  # Under a name of its own, because the ca-certificates package writes the usual one anew.
  [[ ! -f /etc/ssl/certs/ca-certificates.crt ]] ||
    install -D -m 644 /etc/ssl/certs/ca-certificates.crt "$base/etc/ssl/replay.crt"
}

# Variables of this machine that the steps need to reach package archives.
network_environment() {
  env | grep -iE '^(https?_proxy|no_proxy|ftp_proxy|all_proxy|PIP_(INDEX_URL|EXTRA_INDEX_URL|TRUSTED_HOST|PROXY|DEFAULT_TIMEOUT))=' || true
  [[ ! -f "$work/base/etc/ssl/replay.crt" ]] || echo PIP_CERT=/etc/ssl/replay.crt
}

stage="" workdir="/" user="0:0" entrypoint="" environment=() stages=0
declare -A stage_roots

begin_stage() {  # FROM image [AS name]
  local fields
  read -ra fields <<< "$1"
  [[ "${fields[0]}" =~ ^debian:(12|bookworm)(-slim)?$ ]] || die "FROM ${fields[0]}: only debian:12 is replayed"
  stage="$work/stage$stages"
  cp -a "$work/base" "$stage"
  for at in proc dev; do
    mount --rbind "/$at" "$stage/$at" && mount --make-rslave "$stage/$at"
    mounted=("$stage/$at" "${mounted[@]}")
  done
  stage_roots[$stages]="$stage"
  [[ -z "${fields[2]:-}" ]] || stage_roots[${fields[2]}]="$stage"
  stages=$((stages + 1)) workdir="/" user="0:0" entrypoint="" environment=()
}

# Runs a command in the stage as the current USER, WORKDIR and ENV; `launch=exec` replaces the shell.
in_stage() {
  local id="${user%%:*}" group="${user##*:}"
  mapfile -t network < <(network_environment)
  ${launch:-} chroot --userspec="$id:$group" "$stage" /usr/bin/env -i -C "$workdir" \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
    "${network[@]}" "${environment[@]}" "$@"
}

copy() {  # [--from=stage] source... target
  local sources from="$source_root" target
  read -ra sources <<< "$1"
  if [[ "${sources[0]}" == --from=* ]]; then
    from="${stage_roots[${sources[0]#--from=}]:-}"
    [[ -n "$from" ]] || die "COPY ${sources[0]}: no such stage"
    sources=("${sources[@]:1}")
  fi
  [[ "${sources[0]}" != --* ]] || die "COPY ${sources[0]}: not understood"
  target="${sources[-1]}"
  unset 'sources[-1]'
  [[ "$target" == /* ]] || target="$workdir/$target"
  if [[ "$from" == "$source_root" ]]; then
    [[ "${sources[*]}" == "." ]] || die "COPY ${sources[*]}: only the whole tree is replayed"
    mkdir -p "$stage$target"
    tar -C "$from" --exclude=./.git --exclude=./build --exclude=__pycache__ -cf - . | tar -C "$stage$target" --no-same-owner -xf -
  else
    install -D -t "$stage$target" "${sources[@]/#/$from}"
  fi
}

step() {  # one whole instruction
  local word="${1%% *}" rest="${1#* }"
  echo "== $word ${rest:0:100}"
  case "$word" in
    FROM) begin_stage "$rest" ;;
    WORKDIR) workdir="$rest" && mkdir -p "$stage$workdir" ;;
    COPY) copy "$rest" ;;
    RUN) in_stage /bin/sh -c "$rest" < /dev/null > "$work/run.log" 2>&1 ||
      { tail -n 20 "$work/run.log" >&2; die "RUN failed: ${rest:0:60}"; } ;;
    ENV) read -ra words <<< "$rest" && environment+=("${words[@]}") ;;
    USER) user="$rest" ;;
    ENTRYPOINT) entrypoint="$(tr -d '[]",' <<< "$rest")" ;;
    EXPOSE) ;;
    *) die "$word: not understood" ;;
  esac
}

replay() {
  local line instruction=""
  while IFS= read -r line || [[ -n "$line" ]]; do
    [[ ! "$line" =~ ^[[:space:]]*(#|$) ]] || continue
    if [[ "$line" == *\\ ]]; then
      instruction+="${line%\\} "
      continue
    fi
    step "$instruction$line"
    instruction=""
  done < "$source_root/Dockerfile"
}

# Starts the entry point on loopback, and asks it who it is with the image's own client.
check_daemon() {
  [[ "$user" == 10001:10001 ]] || die "the image runs as $user, not as 10001:10001"
  local address="127.0.0.1:$((20000 + RANDOM % 10000))" log="$work/daemon.log" deadline=$((SECONDS + 30))
  (
    launch="exec"
    in_stage EXPERTD_LISTEN="$address" EXPERTD_PROBE_LISTEN=127.0.0.1:0 $entrypoint
  ) > "$log" 2>&1 < /dev/null &
  daemon_pid=$!
  until in_stage /usr/local/bin/expertctl status --hosts "$address" --json > "$work/status.json" 2>&1; do
    kill -0 "$daemon_pid" 2> /dev/null || { tail -n 20 "$log" >&2; die "the daemon ended"; }
    ((SECONDS < deadline)) || { tail -n 20 "$log" >&2; die "no answer: $(tail -n 1 "$work/status.json")"; }
    sleep 0.2
  done
  local uid
  uid="$(awk '/^Uid:/ {print $2}' "/proc/$daemon_pid/status")"
  [[ "$uid" == 10001 ]] || die "the daemon runs as uid $uid, need 10001"
  cat "$work/status.json"
  kill -TERM "$daemon_pid"
  local status=0
  wait "$daemon_pid" || status=$?
  daemon_pid=""
  ((status == 0)) || die "the daemon ended with status $status on SIGTERM, need 0"
}

make_base
replay
check_daemon
echo "PASS: the image builds, and its daemon answers as uid 10001"
