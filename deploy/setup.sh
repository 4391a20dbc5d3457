#!/usr/bin/env bash
# Makes .venv and installs the project into it: `deploy/setup.sh serve` for a server, `deploy/setup.sh test` for the tests too,
# `deploy/setup.sh image` for a container: as serve, and nothing may be left out.
# Installs nothing outside the project's folder, except Debian's libpython when the stub has none, and for the tests a Chromium, if this user may.
set -euo pipefail
unset CDPATH # or `cd deploy/..` may end in another folder that has a deploy
cd -P "$(dirname "$0")/.."
what=${1:-serve}
stamp=.venv/.installed-$what
say() { printf '[setup] %s\n' "$*"; }

# Its scripts name the folder that they were made in: of a copy they would run the other folder's code.
if [ -e .venv/bin/foretoken ] && [ ! -L .venv ] && ! head -n 2 .venv/bin/foretoken | grep -qF "$PWD/.venv/bin/python"; then
  say "$PWD/.venv was made elsewhere, and came here by a move or a copy: remove it (make clean), and run this again" >&2
  exit 1
fi
is_done() { [ -e "$stamp" ] && [ ! pyproject.toml -nt "$stamp" ] && [ ! constraints.txt -nt "$stamp" ]; }
if is_done; then exit 0; fi

# Two at once, as of `make demo` and `make serve` in two shells, would write over each other's files.
exec 9<deploy/setup.sh
flock --nonblock 9 || { say "another one is at work here; waiting for it ..."; flock 9; }
if is_done; then exit 0; fi

# The server's Python stub reads ASCII paths only: better said before anything is fetched.
if printf '%s' "$PWD" | LC_ALL=C grep -q '[^ -~]'; then
  say "this folder's path has characters beyond ASCII, which the server cannot read: $PWD: move it" >&2
  exit 1
fi

# Without pip it was interrupted while it was made, or could not be made: Debian's Python leaves half a venv where python3-venv is missing.
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.10}; do
    if "$candidate" -c 'import sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then python=$candidate; break; fi
  done
  if [ -z "${python:-}" ]; then
    say "Python 3.10, 3.11 or 3.12 is needed, with its venv module (apt-get install python3 python3-venv); or set PYTHON" >&2
    exit 1
  fi
  say "making .venv with $("$python" --version)"
  "$python" -m venv .venv || { say "the venv could not be made: apt-get install python3-venv" >&2; exit 1; }
fi

version=$(.venv/bin/python -c 'import sys; print(f"{sys.version_info.major}.{sys.version_info.minor}")')
if ! .venv/bin/python -c "import ctypes; ctypes.CDLL('libpython$version.so.1.0')" 2>/dev/null &&
  ! .venv/bin/python -c "import os, sys, sysconfig; f = 'libpython$version.so.1.0'; d = [sysconfig.get_config_var('LIBDIR') or '', sys.base_prefix + '/lib', sys.prefix + '/lib']; sys.exit(not any(os.path.exists(os.path.join(x, f)) for x in d))"; then
  say "fetching libpython$version, which the server's Python stub is linked to"
  if [ "$(id -u)" = 0 ]; then
    { apt-get install -y -qq "libpython$version" || { apt-get update -qq && apt-get install -y -qq "libpython$version"; }; } >/dev/null
  elif (cd .venv && apt-get download -qq "libpython$version" >/dev/null 2>&1); then
    dpkg -x .venv/libpython"$version"_*.deb .venv/libpython && cp .venv/libpython/usr/lib/*/libpython"$version".so.1* .venv/lib/
    (cd .venv/lib && [ -e "libpython$version.so.1.0" ] || ln -s libpython"$version".so.1* "libpython$version.so.1.0")
  else
    say "not found: apt-get install libpython$version" >&2
    exit 1
  fi
fi

pip=".venv/bin/python -m pip --disable-pip-version-check"
has_gpu=
if [ -e /dev/nvidiactl ] && [ "$what" != image ]; then has_gpu=1; fi
say "installing torch (the largest part) ..."
# On a CPU the build for CPUs, where pip's index has one: the other brings gigabytes of a GPU's libraries along.
torch=$(sed -n 's/^torch==//p' constraints.txt)
[ -z "$has_gpu" ] && $pip install -q "torch==$torch+cpu" 2>/dev/null || $pip install -q -c constraints.txt torch
say "installing the server (nvidia-pytriton's tritonserver) and the rest ..."
case "$what" in test) target='.[test]' ;; image) target='.[gateway,disaggregation]' ;; *) target='.[gateway]' ;; esac
$pip install -q -c constraints.txt -e "$target" 2> >(grep -v '^ERROR: pip.s dependency\|^nvidia-pytriton .* requires' >&2)
# For the server it carries, where there is none (in NVIDIA's container there is); its Python library, and what that needs, are not used.
command -v tritonserver >/dev/null || $pip install -q --no-deps nvidia-pytriton==0.7.0

# For kernels: CUDA's compiler, unless there is one, and PyCUDA, which is source only. It is linked to the driver's library by name alone, so that it is
# built where only the library itself is installed.
build_gpu() {
  find_nvcc='from kernels.toolchain import find_nvcc; print(find_nvcc().removesuffix("/bin/nvcc"))'
  .venv/bin/python -c "$find_nvcc" >/dev/null 2>&1 || $pip install -q 'nvidia-cuda-nvcc>=13,<14' 'nvidia-cuda-runtime>=13,<14' 'nvidia-cuda-cccl>=13,<14' 'nvidia-cuda-profiler-api>=13,<14' 'nvidia-curand>=10.4'
  cuda=$(.venv/bin/python -c "$find_nvcc") && mkdir -p .venv/cuda-stub &&
    "${CC:-cc}" -shared -Wl,-soname,libcuda.so.1 -o .venv/cuda-stub/libcuda.so -x c /dev/null &&
    { [ ! -e "$cuda/lib/libcurand.so.10" ] || ln -sf "$cuda/lib/libcurand.so.10" .venv/cuda-stub/libcurand.so; } &&
    CUDA_ROOT="$cuda" LIBRARY_PATH="$PWD/.venv/cuda-stub:$cuda/lib:$cuda/lib64" PATH="$cuda/bin:$PATH" $pip install -q pycuda
}
if [ -n "$has_gpu" ]; then
  say "this machine has a GPU: installing CUDA's compiler and PyCUDA (built here, some minutes) ..."
  if ! build_gpu >.venv/gpu.log 2>&1; then
    tail -n 20 .venv/gpu.log >&2
    say "not built: without it a GPU is not used (see .venv/gpu.log; foretoken serve --device cpu goes on without)" >&2
    exit 1
  fi
fi

# For steps on CPU, into the project's folder.
say "compiling kernels for this machine's processor ..."
if ! .venv/bin/python -m kernels._load_cpu $([ "$what" != image ] || echo --all) >.venv/cpu-kernels.log 2>&1; then
  say "not compiled: torch computes steps on CPU instead, which takes about twice as long (it needs g++; see .venv/cpu-kernels.log)" >&2
  if [ "$what" != serve ]; then tail -n 20 .venv/cpu-kernels.log >&2 && exit 1; fi
fi

# For the test of dashboards and alerts; unpacked here, so no service starts.
fetch_prometheus() {
  command -v prometheus promtool || {
    cd .venv && { apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }; } && dpkg -x prometheus_*.deb prometheus
  }
}
if [ "$what" = test ] && ! (fetch_prometheus) >/dev/null 2>&1; then
  say "no Prometheus (apt-get install prometheus): dashboards and alerts are not tested" >&2
fi

# For the tests of prefill and decode apart; unpacked too. The server is one of the tools under another name.
fetch_redis() {
  command -v redis-server || {
    mkdir -p .venv/redis && cd .venv/redis && packages="redis-tools liblzf1 libjemalloc2 libatomic1" &&
      { apt-get download -qq $packages || { apt-get update -qq && apt-get download -qq $packages; }; } &&
      for package in *.deb; do dpkg -x "$package" .; done && ln -sf redis-check-rdb usr/bin/redis-server &&
      LD_LIBRARY_PATH="$(echo "$PWD"/usr/lib/*)" usr/bin/redis-server --version
  }
}
if [ "$what" = test ] && ! (fetch_redis) >/dev/null 2>&1; then
  say "no Redis server: apt-get install redis-server" >&2
  exit 1
fi

# For the tests of the gateway's page: the distribution's, which needs no other host than that of the packages.
if [ "$what" = test ] && ! command -v chromium >/dev/null; then
  say "fetching Chromium, for the tests of the page ..."
  if [ "$(id -u)" = 0 ]; then
    { apt-get install -y -qq --no-install-recommends chromium || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }; } >/dev/null
  else
    .venv/bin/playwright install chromium || { say "no Chromium: apt-get install chromium" >&2; exit 1; }
  fi
fi
touch "$stamp"
say "done"
