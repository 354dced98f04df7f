#!/bin/sh
# Runs a command as in a slim, read-only container, on a host that has everything: compilers and CUDA toolkits are
# hidden, all file systems are read-only, and only WRITABLE (an empty tmpfs there) can be written.
#
#     sudo examples/container/slim.sh WRITABLE -- tlcache run --overlay WRITABLE/kernels -- python serve.py
#
# It needs root or CAP_SYS_ADMIN, and `unshare` and `mount` of util-linux. Nothing outside the command changes.
set -eu

if [ "$#" -lt 3 ] || [ "$2" != -- ]; then
  echo "usage: $0 WRITABLE -- COMMAND …" >&2
  exit 2
fi
if [ "${TLCACHE_SLIM:-}" != "$$" ]; then
  TLCACHE_SLIM=$$ exec unshare --mount --propagation private "$0" "$@"
fi
unset TLCACHE_SLIM
writable=$1
shift 2
mkdir -p "$writable"
mount -t tmpfs -o mode=0755 tmpfs "$writable"
nothing=$writable/.nothing
mkdir "$nothing"
: >"$nothing/program"
chmod 000 "$nothing/program"
mkdir "$nothing/directory"

# Where programs are: on PATH, and the toolkits that Python packages bring.
places=$(printf %s "$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin" | tr : '\n')
places="$places
$(python3 -c 'import glob, sys; print("\n".join(p for s in sys.path for p in glob.glob(s + "/nvidia/*/bin")))')"
echo "$places" | sort -u | while read -r place; do
  for program in "$place"/nvcc "$place"/ptxas "$place"/fatbinary "$place"/nvlink "$place"/cudafe++ "$place"/cicc \
    "$place"/cc "$place"/c++ "$place"/c99 "$place"/c89 "$place"/gcc* "$place"/g++* "$place"/clang* "$place"/cpp* \
    "$place"/x86_64-linux-gnu-g[c+][c+]* "$place"/aarch64-linux-gnu-g[c+][c+]* "$place"/as "$place"/ld "$place"/ld.bfd "$place"/ld.gold "$place"/ld.lld; do
    file=$(readlink -f "$program" || true)
    if [ -f "$file" ] && [ -x "$file" ]; then
      mount --bind "$nothing/program" "$file"
    fi
  done
done
for toolkit in /usr/local/cuda* /usr/lib/gcc "${CUDA_HOME:-/nowhere}"; do
  place=$(readlink -f "$toolkit" || true)
  if [ -d "$place" ] && [ "$place" != / ]; then
    mount --bind "$nothing/directory" "$place"
  fi
done

# Everything else is read-only; devices and kernel interfaces are what they are.
awk '{ print $2, $3 }' /proc/self/mounts | while read -r place kind; do
  place=$(printf '%b' "$place")
  case $place:$kind in
    /proc* | /sys* | /dev* | "$writable":*) ;;
    *) mount -o remount,bind,ro "$place" 2>/dev/null || echo "$0: $place stays as it is" >&2 ;;
  esac
done
exec "$@"
