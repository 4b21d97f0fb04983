#!/usr/bin/env bash
# Finds or makes a rustc that can build for wasm32-wasip1 and wasm32-wasip2.
#
#   usage:  RUSTC=$(scripts/setup-wasm.sh) cargo build --profile guest --target wasm32-wasip2
#
# Prints the path of that rustc on stdout, everything else on stderr. Tries, in this order:
#   1. the rustc in use, with the targets that it has or that `rustup target add` gives it;
#   2. Debian's rustc with its prebuilt wasm libraries, unpacked into a cache folder.
# The second way is for machines that reach a Debian mirror but not static.rust-lang.org. It installs
# nothing: apt works in a root of its own, and neither dpkg nor /usr nor ~/.cargo is touched. It needs no
# root, may run twice at the same time, and is quick when the cache is filled.
#
#   ROUSE_WASM_CACHE    the cache folder          (default: ~/.cache/rouse/wasm-rust)
#   ROUSE_WASM_SUITES   Debian suites to try      (default: forky sid trixie)
#   ROUSE_WASM_DEBIAN   1: skip the first way     (to try the second one out)
set -euo pipefail

TARGETS=(wasm32-wasip1 wasm32-wasip2)
CACHE=${ROUSE_WASM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rouse/wasm-rust}
SUITES=${ROUSE_WASM_SUITES:-forky sid trixie}
HOST_TRIPLE=x86_64-unknown-linux-gnu

say() { printf 'setup-wasm: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

# Links one small library for each target: a target that is listed may still lack its linker.
can_build() {
    local rustc=$1 target dir
    [ -x "$rustc" ] || return 1
    dir=$(mktemp -d)
    echo 'pub fn text(n: u32) -> String { (0..n).map(|i| i.to_string()).collect() }
          #[unsafe(no_mangle)] pub extern "C" fn len(n: u32) -> usize { text(n).len() }' >"$dir/probe.rs"
    for target in "${TARGETS[@]}"; do
        if ! "$rustc" --edition 2024 --crate-type cdylib --target "$target" -C panic=abort \
            -o "$dir/$target.wasm" "$dir/probe.rs" >"$dir/log" 2>&1; then
            say "$rustc cannot build for $target: $(grep -m1 '^error' "$dir/log" || head -n 1 "$dir/log")"
            rm -rf "$dir"
            return 1
        fi
    done
    rm -rf "$dir"
}

try_own_toolchain() {
    local rustc
    rustc=$(rustup which rustc 2>/dev/null || command -v rustc) || return 1
    if can_build "$rustc" 2>/dev/null; then echo "$rustc"; return; fi
    command -v rustup >/dev/null || return 1
    timeout 120 rustup target add "${TARGETS[@]}" >&2 || return 1
    if can_build "$rustc"; then echo "$rustc"; else return 1; fi
}

# The address of the Debian mirror that this machine's apt uses; not that of the security archive.
debian_mirror() {
    local codename mirror
    codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-none}")
    mirror=$(apt-get indextargets --format '$(ORIGIN) $(CODENAME) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
        awk -v code="$codename" '$1 == "Debian" && $2 == code { print $3; exit }')
    # Before the first `apt-get update` apt knows no origins: read its source lists instead.
    [ -n "$mirror" ] || mirror=$(cat /etc/apt/sources.list.d/*.sources 2>/dev/null |
        awk '$1 == "URIs:" && $2 !~ /security/ { print $2; exit }')
    [ -n "$mirror" ] || mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null |
        sed -E 's/^deb +\[[^]]*\]/deb/' | awk '$1 == "deb" && $2 !~ /security/ { print $2; exit }')
    [ -n "$mirror" ] && echo "$mirror"
}

# Downloads Debian's packages of one suite into $1/cache/archives, with an apt that shares no state.
download_packages() {
    local work=$1 suite=$2 mirror=$3
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/dpkg"
    : >"$work/dpkg/status"
    echo "deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" \
        >"$work/sources.list"
    local apt=(apt-get -q -y
        -o "Dir::State=$work" -o "Dir::State::lists=$work/lists" -o "Dir::State::status=$work/dpkg/status"
        -o "Dir::State::extended_states=$work/extended" -o "Dir::Cache=$work/cache"
        -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=/dev/null
        -o Dir::Etc::preferences=/dev/null -o Dir::Etc::preferencesparts=/dev/null
        -o APT::Architecture=amd64 -o APT::Architectures::=amd64 -o "APT::Sandbox::User=$(id -un)"
        -o APT::Install-Recommends=false -o APT::Keep-Downloaded-Packages=true
        -o Acquire::Languages=none -o Acquire::Retries=3
        -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false
        -o Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false)
    "${apt[@]}" update
    "${apt[@]}" --download-only install libstd-rust-dev libstd-rust-dev-wasm32
    (cd "$work/cache/archives" && "${apt[@]}" download rustc)
}

# Unpacks without running any package script, and leaves out what a guest build does not read.
unpack_packages() {
    local archives=$1 root=$2 deb
    mkdir -p "$root"
    for deb in "$archives"/*.deb; do
        dpkg-deb --fsys-tarfile "$deb" | tar -C "$root" -x --no-same-owner --keep-directory-symlink \
            --exclude='./usr/share/*' --exclude='./etc/*' --exclude='./var/*' \
            --exclude='*/gconv/*' --exclude='*/wasm32-unknown-unknown/*'
    done
}

# Debian's rustc needs Debian's own loader and libraries, and the wasm linkers of this machine's Rust.
write_wrapper() {
    local root=$1 wrapper=$2 linkers=$3 loader name
    loader=$(find "$root" -name ld-linux-x86-64.so.2 -type f -print -quit)
    [ -n "$loader" ] || return 1
    mkdir -p "$root/usr/lib/rustlib/$HOST_TRIPLE/bin"
    for name in rust-lld wasm-component-ld gcc-ld; do
        ln -sfn "$linkers/$name" "$root/usr/lib/rustlib/$HOST_TRIPLE/bin/$name"
    done
    cat >"$wrapper" <<WRAPPER
#!/bin/sh
exec "$loader" --library-path "$root/usr/lib/x86_64-linux-gnu:$root/lib/x86_64-linux-gnu" \
    "$root/usr/bin/rustc" --sysroot "$root/usr" "\$@"
WRAPPER
    chmod +x "$wrapper"
}

unpack_debian() {
    local linkers mirror suite work rustc
    [ "$(uname -sm)" = "Linux x86_64" ] && command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null ||
        fail "no wasm targets: rustup cannot add them, and this is not Debian on x86_64." \
            "Install a toolchain that has ${TARGETS[*]}, and set RUSTC to its rustc."
    mkdir -p "$CACHE"
    CACHE=$(cd "$CACHE" && pwd -P)
    rustc=$CACHE/rustc
    exec 9>"$CACHE/lock"
    flock 9
    if can_build "$rustc"; then echo "$rustc"; return; fi

    linkers=$(rustc --print sysroot)/lib/rustlib/$HOST_TRIPLE/bin
    [ -x "$linkers/rust-lld" ] && [ -x "$linkers/wasm-component-ld" ] ||
        fail "rust-lld and wasm-component-ld are not in $linkers: install Rust with rustup"
    mirror=$(debian_mirror) || fail "cannot tell which Debian mirror apt uses: see /etc/apt"

    work=$CACHE/work
    for suite in $SUITES; do
        say "downloading rustc and its wasm libraries from Debian $suite ($mirror)"
        rm -rf "$work"
        if ! download_packages "$work" "$suite" "$mirror" >"$CACHE/apt.log" 2>&1; then
            say "Debian $suite failed: $(grep -m1 '^E:' "$CACHE/apt.log" || echo "see $CACHE/apt.log")"
            continue
        fi
        rm -rf "$CACHE/root" "$rustc"
        unpack_packages "$work/cache/archives" "$CACHE/root"
        rm -rf "$work"
        write_wrapper "$CACHE/root" "$CACHE/rustc.new" "$linkers" || { say "Debian $suite has no loader"; continue; }
        if can_build "$CACHE/rustc.new"; then
            mv "$CACHE/rustc.new" "$rustc"
            say "ready: $("$rustc" --version) from Debian $suite, in $CACHE"
            echo "$rustc"
            return
        fi
    done
    fail "no Debian suite worked (tried: $SUITES); the last log is $CACHE/apt.log"
}

if [ "${ROUSE_WASM_DEBIAN:-0}" != 1 ] && try_own_toolchain; then exit 0; fi
unpack_debian
