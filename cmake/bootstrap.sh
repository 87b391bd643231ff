#!/usr/bin/env bash
# Sets up what attn is built with, system packages and LibTorch, on Debian 12 and Ubuntu 24.04 or later; elsewhere it
# names what is missing. It installs only that: a second run changes nothing.
set -euo pipefail

readonly torch_version=2.15.0
readonly cache=${XDG_CACHE_HOME:-${HOME:?bootstrap: set HOME or XDG_CACHE_HOME}/.cache}/attn
readonly venv=$cache/torch-$torch_version  # one for all checkouts; AttnTorch.cmake looks there
# Beside torch, what the scripts in tests/golden import; the versions that the goldens were made with.
readonly golden_packages=(numpy safetensors transformers==5.25.0 tokenizers==0.23.3)
readonly golden_imports='import numpy, safetensors, tokenizers, torch, transformers'
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
  cat <<END
usage: cmake/bootstrap.sh [--python]

Installs what is missing for building attn: system packages (with apt) and LibTorch $torch_version (the Python wheel,
in an environment of its own under $cache).
A LibTorch 2.11 or later that you have is used instead: LibTorch_ROOT, Torch_DIR, CMAKE_PREFIX_PATH, or the active
Python environment's.

  --python  also set up what the scripts in tests/golden need (torch for Python, numpy, safetensors, transformers,
            tokenizers; about 5.7 GB), and print the Python to run them with on standard output
  --help    print this text
END
}

say() { echo "bootstrap: $*" >&2; }

die() {
  say "$*"
  exit 1
}

# quietly <name> <remedy> <command>...: the command's output is shown only when it fails; the remedy then ends the run.
quietly() {
  local name=$1 remedy=$2 output
  if ! output=$("${@:3}" 2>&1); then
    tail -n 15 <<<"$output" >&2
    die "$name failed; $remedy"
  fi
}

# --- System packages ---------------------------------------------------------------------------------------------

has_cmake() {
  local version
  version=$(cmake --version 2>/dev/null) || return 1
  [[ $version =~ ([0-9]+)\.([0-9]+) ]] && ((BASH_REMATCH[1] * 100 + BASH_REMATCH[2] >= 325))
}

has_command() { command -v "$1" >/dev/null; }

has_header() {
  local prefix prefixes
  IFS=: read -ra prefixes <<<"/usr:/usr/local:${CONDA_PREFIX:-}:${CMAKE_PREFIX_PATH:-}"
  for prefix in "${prefixes[@]}"; do
    if [[ -n $prefix && -e $prefix/include/$1 ]]; then return 0; fi
  done
  return 1
}

# Looks for the things, not for packages: who built a newer CMake, or has no dpkg, needs no second one.
missing_packages() {
  has_cmake || echo cmake
  has_command ninja || has_command ninja-build || echo ninja-build
  has_command "${CXX:-c++}" || echo g++
  has_command ccache || echo ccache
  has_header fmt/core.h || echo libfmt-dev
  has_header gtest/gtest.h || echo libgtest-dev
  has_header benchmark/benchmark.h || echo libbenchmark-dev
  has_header CLI/CLI.hpp || echo libcli11-dev
  has_header nlohmann/json.hpp || echo nlohmann-json3-dev
  has_header hwy/highway.h || echo libhwy-dev
  has_header pcre2.h || echo libpcre2-dev
}

install_packages() {
  local as_root=() apt=(env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300)
  has_command apt-get || die "install these first (by Debian's names): $*"
  if ((EUID != 0)); then
    as_root=(sudo)
    { has_command sudo && sudo true; } ||
      die "packages are missing; run as root, then start me again: apt-get update && apt-get install -y $*"
  fi
  say "installing with apt: $*"
  # One broken repository fails the update, though the packages may come from another: the installation decides.
  "${as_root[@]}" "${apt[@]}" update >/dev/null 2>&1 || say "apt-get update failed; going on with the lists that are there"
  quietly "apt-get install" "with the reason above settled (often the network), run cmake/bootstrap.sh again" \
    "${as_root[@]}" "${apt[@]}" install -y --no-install-recommends "$@"
}

# --- LibTorch ----------------------------------------------------------------------------------------------------

find_torch() { cmake -P "$here/AttnTorch.cmake" 2>&1; }

# A Python that can make the environment; the system's first, since others are removed more easily.
usable_python() {
  local python
  for python in /usr/bin/python3 python3; do
    if "$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$python"
      return 0
    fi
  done
  return 1
}

# install_torch cpu: what C++ on the CPU links. install_torch full: with CUDA, and importable by Python.
install_torch() {
  local kind=$1 size='5.5 GB' python wanted=("torch==$torch_version" "${golden_packages[@]}")
  local remedy="check the network and pip's settings and run cmake/bootstrap.sh again, or set LibTorch_ROOT to a LibTorch"
  if [[ $kind == cpu ]]; then
    # Of the wheel's companions, 4 GB together, libtorch_cpu.so needs two.
    size='1.3 GB'
    wanted=(--no-deps "torch==$torch_version" 'nvidia-cuda-runtime==13.2.*' 'nvidia-cuda-cupti==13.2.*')
  fi

  mkdir -p "$cache" || die "$cache can't be made; set XDG_CACHE_HOME to a folder that can be written"
  exec 9>"$venv.lock"
  flock --nonblock 9 || { say "waiting for another bootstrap.sh"; flock 9; }
  # `complete` is written last: without it, a run was interrupted and its rest is of no use.
  if [[ ! -e $venv/complete ]] || ! "$venv/bin/python" -c '' 2>/dev/null; then
    if ! python=$(usable_python); then
      if has_command apt-get; then install_packages python3-venv; fi
      python=$(usable_python) || die "Python 3.11 or later with its venv module is needed; install it, or set LibTorch_ROOT"
    fi
    rm -rf "$venv"
    quietly "python3 -m venv" "look at the lines above" "$python" -m venv "$venv"
  elif [[ $(<"$venv/complete") == full && $kind == full ]]; then
    # Made by an older bootstrap.sh, it may lack some.
    "$venv/bin/python" -c "$golden_imports" 2>/dev/null ||
      quietly "pip install" "$remedy" "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${wanted[@]}"
    return
  elif [[ $(<"$venv/complete") =~ ^(full|$kind)$ ]]; then
    return
  fi
  say "installing LibTorch $torch_version ($kind, $size, some minutes) into $venv"
  quietly "pip install" "$remedy" "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${wanted[@]}"
  echo "$kind" >"$venv/complete.new"
  mv "$venv/complete.new" "$venv/complete"
}

# The Python that has all that generate.py imports: the active one, or ours.
golden_python() {
  local python
  for python in "${VIRTUAL_ENV:-${CONDA_PREFIX:-/usr}}/bin/python3" python3; do
    if "$python" -c "$golden_imports" 2>/dev/null; then
      echo "$python"
      return 0
    fi
  done
  echo "$venv/bin/python"
  [[ $(cat "$venv/complete" 2>/dev/null) == full ]] && "$venv/bin/python" -c "$golden_imports" 2>/dev/null
}

# --- What to do --------------------------------------------------------------------------------------------------

with_python=false
for argument in "$@"; do
  case $argument in
    --python) with_python=true ;;
    --help | -h) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
done

mapfile -t packages < <(missing_packages)
if ((${#packages[@]})); then
  install_packages "${packages[@]}"
  has_cmake || die "CMake 3.25 or later is needed, and apt's is older; install one (pip has it too, as cmake)"
fi

found=$(find_torch) || { echo "$found" >&2; die "correct the variable named above, or unset it"; }
grep -F 'attn: skipping' <<<"$found" >&2 || true
kind=cpu
if [[ -e /proc/driver/nvidia/version ]]; then kind=full; fi
python=""
if $with_python && ! python=$(golden_python); then
  install_torch full
elif [[ $found == *'attn: no LibTorch'* || $found == *" in $venv/"* ]]; then
  install_torch "$kind"
fi

found=$(find_torch)
say "ready: ${found##*attn: }"
if $with_python; then echo "$python"; fi
