#!/usr/bin/env bash
# Finds or makes a Swift 6 toolchain and runs commands with it.
#
#   scripts/swift_toolchain.sh provide       find one; where there is none, make one (Linux, as root)
#   scripts/swift_toolchain.sh find          say which one is used; exit 1 when there is none
#   scripts/swift_toolchain.sh run CMD ...   run a command with it, e.g. run swift build
#   scripts/swift_toolchain.sh remove        delete what `provide` made
#
# A `swift` on the path is used as it is. Otherwise `provide` makes a Debian 13 root folder with Debian's own
# package `swiftlang` (debootstrap is unpacked, not installed; the system itself stays as it is): some minutes,
# 3 GB. `run` enters that root with the current folder's repository at its own path and the whole system under
# /host, so that programs in it can start the system's Python (SS_PYTHON).
#
# SWIFT_TOOLCHAIN_DIR   where the root lives   (default: ss-device/swift in the user's cache folder)
# SWIFT_DEBIAN_MIRROR   Debian mirror          (default: the one in apt's sources)
set -euo pipefail

FOLDER="${SWIFT_TOOLCHAIN_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/ss-device/swift}"
ROOT="$FOLDER/root"
COMPLETE="$FOLDER/.complete"
SUITE=trixie

say() { echo "swift toolchain: $*" >&2; }
fail() { say "$*"; exit 1; }

is_root_ready() { [ -f "$COMPLETE" ] && [ -L "$ROOT/usr/bin/swift" ]; }  # a link that only leads somewhere inside

find_toolchain() {
    if command -v swift >/dev/null; then say "$(command -v swift)"
    elif is_root_ready; then say "$ROOT"
    else return 1
    fi
}

# --- making a root ---------------------------------------------------------------------------------

mirror() {
    if [ -n "${SWIFT_DEBIAN_MIRROR:-}" ]; then echo "$SWIFT_DEBIAN_MIRROR"; return; fi
    { sed -n 's/^URIs: *\([^ ]*\).*/\1/p' /etc/apt/sources.list.d/debian.sources
      sed -n 's/^deb \(\[[^]]*\] *\)\?\([^ ]*\).*/\2/p' /etc/apt/sources.list; } 2>/dev/null |
        grep '/debian/\?$' | head -n 1
}

check_possible() {
    [ "$(uname -s)" = Linux ] || fail "there is no swift here; install Xcode, or a toolchain of swift.org"
    [ "$(id -u)" = 0 ] || fail "there is no swift here, and making a Debian root needs root rights (chroot):" \
        "install Swift 6, or run this as root"
    command -v apt-get >/dev/null || fail "there is no swift here, and no apt-get to fetch debootstrap: install Swift 6"
    unshare --mount true 2>/dev/null ||
        fail "there is no swift here, and this machine does not allow mounts (unshare --mount): install Swift 6"
    [ -n "$(mirror)" ] || fail "no Debian mirror in apt's sources: set SWIFT_DEBIAN_MIRROR"
}

# Debian's debootstrap is a shell script; prints its path.
provide_debootstrap() {
    if command -v debootstrap; then return; fi
    local parts="$FOLDER/debootstrap"
    mkdir -p "$parts"
    (cd "$parts" && { apt-get download -qq debootstrap || { apt-get update -qq && apt-get download -qq debootstrap; }; }) \
        >>"$FOLDER/log" 2>&1 || fail "cannot download Debian's debootstrap; the log is $FOLDER/log"
    dpkg-deb -x "$parts"/debootstrap_*.deb "$parts"
    echo "$parts/usr/sbin/debootstrap"
}

install_swift() {
    unshare --mount --propagation private bash -c '
        mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev" &&
        chroot "$1" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive \
            apt-get install -y --no-install-recommends swiftlang libc6-dev libstdc++-14-dev git
    ' install "$ROOT"
}

# step TEXT COMMAND...: runs a command into the log; its end is shown only when something failed.
step() {
    local text="$1"; shift
    "$@" >>"$FOLDER/log" 2>&1 || { tail -n 5 "$FOLDER/log" >&2; fail "$text failed; the whole log is $FOLDER/log"; }
}

make_root() {
    check_possible
    mkdir -p "$FOLDER"
    rm -rf "$ROOT" "$COMPLETE"
    say "making a Debian 13 root with swiftlang in $FOLDER (3 GB, some minutes) ..."
    local debootstrap; debootstrap="$(provide_debootstrap)"
    DEBOOTSTRAP_DIR="$(cd "$(dirname "$debootstrap")/../share/debootstrap" && pwd)" \
        step "debootstrap" "$debootstrap" --variant=minbase --include=ca-certificates "$SUITE" "$ROOT" "$(mirror)"
    step "installing swiftlang" install_swift
    rm -rf "$ROOT/var/cache/apt/archives" "$ROOT/var/lib/apt/lists" "$FOLDER/debootstrap"
    touch "$COMPLETE"
    say "done"
}

# --- running -----------------------------------------------------------------------------------------

# Mounts live in a namespace of their own and end with the command.
run_in_root() {
    [ "$(id -u)" = 0 ] || fail "entering $ROOT needs root rights (chroot)"
    local repository variables
    repository="$(git rev-parse --show-toplevel 2>/dev/null || pwd)"
    mapfile -t variables < <(env | grep -E '^(SS_|OMP_NUM_THREADS=)' | grep -v '^SS_PYTHON=' || true)
    mkdir -p "$ROOT/host"
    exec unshare --mount --propagation private bash -c '
        root="$1"; repository="$2"; folder="$3"; python="$4"; count="$5"; shift 5
        variables=("${@:1:count}"); shift "$count"
        mount --rbind / "$root/host"
        mkdir -p "$root$repository"
        mount --bind "$repository" "$root$repository"
        mount -t proc proc "$root/proc"
        mount --rbind /dev "$root/dev"
        exec chroot "$root" /usr/bin/env -i HOME=/root LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin \
            SS_PYTHON="chroot /host $python" "${variables[@]}" \
            /bin/bash -c "cd \"\$1\" && shift && exec \"\$@\"" run "$folder" "$@"
    ' run "$ROOT" "$repository" "$PWD" "${SS_PYTHON:-/usr/bin/python3}" "${#variables[@]}" "${variables[@]}" "$@"
}

case "${1:-}" in
    provide) find_toolchain || make_root ;;
    find) find_toolchain ;;
    run)
        shift
        if command -v swift >/dev/null; then exec "$@"; fi
        is_root_ready || fail "there is no toolchain yet: $0 provide"
        run_in_root "$@" ;;
    remove) rm -rf "$FOLDER" ;;
    *) sed -n '2,17s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
