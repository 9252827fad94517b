#!/bin/sh
# Builds examples/c with pkg-config against what installed.cmake installed, and runs it. The paths have spaces.
#   installed_pkg_config.sh FOLDER COMPILER VERSION      FOLDER as WORK of installed.cmake
# Exits with 77 and the reason if there is no pkg-config.
set -eu
work=$1 compiler=$2 version=$3

tool=$(command -v pkg-config || command -v pkgconf) || {
    echo "skipped: no pkg-config and no pkgconf on PATH (Debian: apt-get install pkgconf)"
    exit 77
}
description=$(find "$work/an installed spccl" -name spccl.pc)
[ -f "$description" ] || { echo "no spccl.pc in $work/an installed spccl"; exit 1; }
PKG_CONFIG_PATH=$(dirname "$description")
export PKG_CONFIG_PATH

found=$("$tool" --modversion spccl)
[ "$found" = "$version" ] || { echo "$tool --modversion spccl: $found, wanted $version"; exit 1; }

flags=$("$tool" --cflags --libs spccl)
echo "flags: $flags"
program="$work/an example/with_pkg_config"
# pkg-config escapes the spaces of the paths for a shell.
eval '"$compiler" -o "$program" "$work/an example/all_reduce.c"' "$flags"
LD_LIBRARY_PATH=$(dirname "$PKG_CONFIG_PATH")
export LD_LIBRARY_PATH
output=$("$program")
echo "$output"
for rank in 0 1; do
    case $output in
    *"rank $rank: 0 wrong"*) ;;
    *) echo "wanted 'rank $rank: 0 wrong'"; exit 1 ;;
    esac
done
