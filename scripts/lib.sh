# shellcheck shell=bash
# Common part of the scripts in this folder. Source it, call vpkl_setup, and
# Kokkos_ROOT and KokkosKernels_ROOT are exported.
#
# Environment:
#   Kokkos_ROOT          use this Kokkos installation instead of building one
#   KokkosKernels_ROOT   the same for Kokkos Kernels (default: Kokkos_ROOT)
#   VPKL_CACHE_DIR       where the Kokkos build is kept
#                        (default: ${XDG_CACHE_HOME:-$HOME/.cache}/vpkl)
#   VPKL_JOBS            parallel compile jobs (default: the number of cores)
#   CXX                  C++ compiler (default: g++)

VPKL_SOURCE_DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VPKL_JOBS="${VPKL_JOBS:-$(nproc 2>/dev/null || echo 2)}"
VPKL_SHELL_START="${VPKL_SHELL_START:-$(date +%s)}"
export VPKL_SHELL_START

# Debian's own Python: h5py and NumPy come from Debian packages, and another
# python3 may well be first in PATH.
VPKL_PYTHON="${VPKL_PYTHON:-/usr/bin/python3}"
export VPKL_PYTHON

# --- what is installed --------------------------------------------------------

# The OpenMP build of OpenBLAS shares the thread pool of the surrounding OpenMP
# code and runs serially inside a parallel region. The pthread build keeps a
# second pool of its own, which oversubscribes the cores. Kokkos Kernels looks for
# the names of BLAS functions with a Fortran compiler.
VPKL_PACKAGES=(
  cmake ninja-build g++ gfortran pkg-config
  libhdf5-dev hdf5-tools
  libopenmpi-dev openmpi-bin
  libopenblas-openmp-dev
  libgtest-dev libgmock-dev libbenchmark-dev
  libcli11-dev nlohmann-json3-dev libfmt-dev libssl-dev
  python3 python3-h5py python3-numpy python3-matplotlib
)

VPKL_KOKKOS_VERSION=3.4.1
VPKL_TRILINOS_TARBALL=trilinos_13.2.0.orig.tar.gz
VPKL_TRILINOS_SHA256=0ddb47784ba7b8a6b9a07a4822b33be508feb4ccd54301b2a5d10c9e54524b90

# Shared libraries, because one process must hold one Kokkos only, however many
# libraries on top of it are loaded. No -march=native: the result runs on any
# machine of the architecture.
VPKL_COMMON_CMAKE=(
  -DCMAKE_BUILD_TYPE=Release
  -DCMAKE_CXX_STANDARD=17
  -DCMAKE_CXX_EXTENSIONS=OFF
  -DCMAKE_POSITION_INDEPENDENT_CODE=ON
  -DBUILD_SHARED_LIBS=ON
  -DCMAKE_INSTALL_LIBDIR=lib
  "-DCMAKE_INSTALL_RPATH=\$ORIGIN"
)
VPKL_KOKKOS_CMAKE=(
  -DKokkos_ENABLE_OPENMP=ON
  -DKokkos_ENABLE_SERIAL=ON
  -DKokkos_ENABLE_TESTS=OFF
  -DKokkos_ENABLE_EXAMPLES=OFF
)
# No pre-instantiated kernels: only the BLAS wrapper is wanted, so that
# KokkosBlas::gemm calls sgemm and dgemm of OpenBLAS.
VPKL_KOKKOS_KERNELS_CMAKE=(
  -DKokkosKernels_ADD_DEFAULT_ETI=OFF
  -DKokkosKernels_ENABLE_TPL_BLAS=ON
  -DKokkosKernels_ENABLE_TPL_LAPACK=OFF
  -DKokkosKernels_ENABLE_TESTS=OFF
  -DKokkosKernels_ENABLE_PERFTESTS=OFF
  -DKokkosKernels_ENABLE_EXAMPLES=OFF
  -DBLA_VENDOR=OpenBLAS
)

# --- messages -----------------------------------------------------------------

vpkl_elapsed() { echo "$(($(date +%s) - VPKL_SHELL_START))"; }

# One line a step, with the seconds since the first script started.
vpkl_say() { printf '[%4ss] %s\n' "$(vpkl_elapsed)" "$*" >&2; }

vpkl_die() {
  printf '\nvpkl: %s\n' "$1" >&2
  shift
  local line
  for line in "$@"; do printf '      %s\n' "$line" >&2; done
  exit 1
}

VPKL_OTHER_WAYS=(
  "Ways round it:"
  "  - use a Kokkos and Kokkos Kernels that are already installed:"
  "      export Kokkos_ROOT=/path/to/kokkos KokkosKernels_ROOT=/path/to/kokkos-kernels"
  "      cmake --preset openmp && cmake --build --preset openmp"
  "  - or install everything with Spack:"
  "      spack repo add $VPKL_SOURCE_DIR/spack && spack install vpkl"
)

# vpkl_quiet LOG COMMAND...: runs the command with its output in LOG; when it
# fails, shows the end of LOG.
vpkl_quiet() {
  local log="$1"
  shift
  if ! "$@" >"$log" 2>&1; then
    tail -n 40 "$log" >&2
    return 1
  fi
}

# --- Debian packages ----------------------------------------------------------

# Prints "ID VERSION_ID CODENAME" of the operating system.
vpkl_os() {
  if [[ -r /etc/os-release ]]; then
    (
      # shellcheck disable=SC1091
      . /etc/os-release
      echo "${ID:-unknown} ${VERSION_ID:-unknown} ${VERSION_CODENAME:-unknown}"
    )
  else
    echo "unknown unknown unknown"
  fi
}

vpkl_as_root() {
  if [[ "$(id -u)" -eq 0 ]]; then
    "$@"
  elif command -v sudo >/dev/null 2>&1; then
    sudo "$@"
  else
    return 127
  fi
}

vpkl_missing_packages() {
  local package
  for package in "$@"; do
    if [[ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" != installed ]]; then
      echo "$package"
    fi
  done
}

vpkl_install_packages() {
  local missing
  mapfile -t missing < <(vpkl_missing_packages "$@")
  if [[ ${#missing[@]} -eq 0 ]]; then
    vpkl_say "Debian packages: all $# present"
    return 0
  fi
  if [[ "$(id -u)" -ne 0 ]] && ! command -v sudo >/dev/null 2>&1; then
    vpkl_die "these Debian packages are missing, and this is neither root nor is sudo here:" \
      "  ${missing[*]}" "Install them, then start again."
  fi
  local log
  log="$(mktemp "${TMPDIR:-/tmp}/vpkl-apt.XXXXXX")"
  vpkl_say "Debian packages: installing ${#missing[@]} missing: ${missing[*]}"
  if ! vpkl_quiet "$log" vpkl_as_root apt-get -o DPkg::Lock::Timeout=300 update; then
    vpkl_die "apt-get update failed (is this machine offline?); log: $log" \
      "Missing packages: ${missing[*]}" "${VPKL_OTHER_WAYS[@]}"
  fi
  if ! vpkl_quiet "$log" vpkl_as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "${missing[@]}"; then
    vpkl_die "apt-get could not install the missing packages (is this machine offline?); log: $log" \
      "Missing packages: ${missing[*]}" "${VPKL_OTHER_WAYS[@]}"
  fi
  rm -f "$log"
  vpkl_say "Debian packages: installed"
}

# --- Kokkos from Debian's trilinos source package -----------------------------

# vpkl_write_deb_src FILE: writes the machine's own apt sources, as deb-src, in
# deb822 form to FILE.sources and in one-line form to FILE.list.
vpkl_write_deb_src() {
  local out="$1" file
  : >"$out.sources"
  : >"$out.list"
  for file in /etc/apt/sources.list.d/*.sources; do
    [[ -r "$file" ]] || continue
    # Paragraphs in: drop disabled ones, replace the type, keep all else
    # (embedded keys included).
    awk 'BEGIN { RS = ""; ORS = "\n\n"; IGNORECASE = 1 }
         /(^|\n)[Ee]nabled:[ \t]*([Nn]o|[Ff]alse|[Oo]ff|0)/ { next }
         { n = split($0, line, "\n"); text = ""
           for (i = 1; i <= n; i++) {
             if (line[i] ~ /^#/) continue
             if (line[i] ~ /^[Tt]ypes:/) line[i] = "Types: deb-src"
             text = text (text == "" ? "" : "\n") line[i]
           }
           if (text ~ /(^|\n)Types:/) print text }' "$file" >>"$out.sources"
  done
  for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
    [[ -r "$file" ]] || continue
    sed -n -E 's/^[[:space:]]*deb([[:space:]])/deb-src\1/p' "$file" >>"$out.list"
  done
}

# vpkl_fetch_trilinos DIR: leaves the verified tarball in DIR. apt checks the
# archive's signature down to the file's checksum; the checksum is pinned here
# as well. The machine's source lists and package lists are not touched.
vpkl_fetch_trilinos() {
  local dir="$1"
  mkdir -p "$dir/apt/parts" "$dir/apt/lists/partial" "$dir/apt/cache/archives/partial" "$dir/source"
  vpkl_write_deb_src "$dir/apt/parts/vpkl"
  if [[ "$(id -u)" -eq 0 ]] && id _apt >/dev/null 2>&1; then
    # apt downloads as the user _apt.
    chmod 755 "$dir"
    chown _apt "$dir/source" "$dir/apt/lists/partial" "$dir/apt/cache/archives/partial"
  fi
  local apt=(
    apt-get
    -o "Dir::Etc::sourcelist=/dev/null"
    -o "Dir::Etc::sourceparts=$dir/apt/parts"
    -o "Dir::State::lists=$dir/apt/lists"
    -o "Dir::Cache=$dir/apt/cache"
    -o "Acquire::Retries=2"
  )
  # Some third party's archive may have no sources: what counts is whether the
  # source package is found afterwards.
  "${apt[@]}" update >"$dir/apt.log" 2>&1 || true
  if ! (cd "$dir/source" && "${apt[@]}" source --download-only --tar-only trilinos) >>"$dir/apt.log" 2>&1 ||
    [[ ! -f "$dir/source/$VPKL_TRILINOS_TARBALL" ]]; then
    tail -n 20 "$dir/apt.log" >&2
    vpkl_die "could not fetch Debian's source package trilinos (is this machine offline?)" \
      "Kokkos $VPKL_KOKKOS_VERSION is built from it." "${VPKL_OTHER_WAYS[@]}"
  fi
  if ! echo "$VPKL_TRILINOS_SHA256  $dir/source/$VPKL_TRILINOS_TARBALL" | sha256sum --check --quiet >&2; then
    vpkl_die "the checksum of $VPKL_TRILINOS_TARBALL is not the expected one" \
      "expected SHA-256 $VPKL_TRILINOS_SHA256"
  fi
}

# Everything the Kokkos build depends on; its hash is part of the folder's name.
vpkl_kokkos_recipe() {
  echo "recipe 1"
  echo "$VPKL_TRILINOS_SHA256"
  "${CXX:-g++}" --version | head -n 1
  "${CXX:-g++}" -dumpmachine
  printf '%s\n' "${VPKL_COMMON_CMAKE[@]}" "${VPKL_KOKKOS_CMAKE[@]}" "${VPKL_KOKKOS_KERNELS_CMAKE[@]}"
}

# vpkl_build_kokkos PREFIX: builds in a temporary folder, installs beside
# PREFIX, and renames when everything has worked. Runs in a subshell.
vpkl_build_kokkos() (
  prefix="$1"
  stage="$prefix.partial"
  work="$(mktemp -d "${TMPDIR:-/tmp}/vpkl-kokkos.XXXXXX")"
  trap 'rm -rf "$work" "$stage"' EXIT
  rm -rf "$stage"

  vpkl_say "Kokkos: fetching Debian's source package trilinos (166 MB)"
  vpkl_fetch_trilinos "$work"
  vpkl_say "Kokkos: checksum verified; unpacking kokkos and kokkos-kernels"
  tar -xzf "$work/source/$VPKL_TRILINOS_TARBALL" -C "$work" --strip-components=2 --no-same-owner \
    --wildcards '*/packages/kokkos' '*/packages/kokkos-kernels'
  rm -rf "$work/source"

  # Flags of the caller's environment must not leak into the cached build.
  unset CXXFLAGS CFLAGS LDFLAGS CPPFLAGS Kokkos_DIR Kokkos_ROOT
  failed() {
    mkdir -p "$(dirname "$prefix")"
    cp "$work/$1.log" "$prefix.$1.log"
    vpkl_die "the build of $1 failed; log: $prefix.$1.log" "${VPKL_OTHER_WAYS[@]}"
  }
  build() {
    local name="$1"
    shift
    vpkl_say "Kokkos: building $name $VPKL_KOKKOS_VERSION ($VPKL_JOBS jobs)"
    {
      vpkl_quiet "$work/$name.log" cmake -G Ninja -S "$work/$name" -B "$work/build-$name" \
        -DCMAKE_CXX_COMPILER="${CXX:-g++}" -DCMAKE_INSTALL_PREFIX="$stage" \
        "${VPKL_COMMON_CMAKE[@]}" "$@" &&
        vpkl_quiet "$work/$name.log" cmake --build "$work/build-$name" -j "$VPKL_JOBS" &&
        vpkl_quiet "$work/$name.log" cmake --install "$work/build-$name"
    } || failed "$name"
  }
  build kokkos "${VPKL_KOKKOS_CMAKE[@]}"
  build kokkos-kernels -DKokkos_ROOT="$stage" "${VPKL_KOKKOS_KERNELS_CMAKE[@]}"

  # The generated files name the folder they were installed to.
  { grep -rlIF "$stage" "$stage" || true; } | while IFS= read -r file; do
    sed -i "s|$stage|$prefix|g" "$file"
  done
  mkdir -p "$stage/share/licenses"
  cp "$work/kokkos/LICENSE" "$stage/share/licenses/kokkos"
  cp "$work/kokkos-kernels/LICENSE" "$stage/share/licenses/kokkos-kernels"
  vpkl_kokkos_recipe >"$stage/vpkl-recipe.txt"
  rm -rf "$prefix"
  mv "$stage" "$prefix"
)

vpkl_setup_kokkos() {
  local cache="${VPKL_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/vpkl}"
  mkdir -p "$cache" || vpkl_die "cannot create the cache folder $cache" "Set VPKL_CACHE_DIR to another place."
  cache="$(cd "$cache" && pwd)"
  local recipe prefix lock
  recipe="$(vpkl_kokkos_recipe | sha256sum | cut -c1-8)"
  prefix="$cache/kokkos-$VPKL_KOKKOS_VERSION-openmp-$recipe"
  if [[ ! -f "$prefix/vpkl-recipe.txt" ]]; then
    exec {lock}>"$cache/.lock"
    if ! flock --nonblock "$lock"; then
      vpkl_say "Kokkos: waiting for another set-up that is building it"
      flock "$lock"
    fi
    if [[ ! -f "$prefix/vpkl-recipe.txt" ]]; then
      # Not in a condition: "set -e" would be off inside.
      vpkl_build_kokkos "$prefix"
    fi
    exec {lock}>&-
  fi
  export Kokkos_ROOT="$prefix"
  export KokkosKernels_ROOT="$prefix"
  vpkl_say "Kokkos: $prefix"
}

# --- the whole set-up ---------------------------------------------------------

vpkl_check_kokkos_root() {
  export Kokkos_ROOT
  export KokkosKernels_ROOT="${KokkosKernels_ROOT:-$Kokkos_ROOT}"
  local name dir found
  for name in Kokkos KokkosKernels; do
    dir="${name}_ROOT"
    dir="${!dir}"
    [[ -d "$dir" ]] || vpkl_die "${name}_ROOT is $dir, which is not a folder"
    found="$(find -L "$dir" -maxdepth 6 -name "${name}Config.cmake" -print -quit)"
    [[ -n "$found" ]] || vpkl_die "${name}_ROOT is $dir, but there is no ${name}Config.cmake below it"
  done
  vpkl_say "Kokkos: $Kokkos_ROOT (from Kokkos_ROOT)"
}

vpkl_setup() {
  local id version codename
  read -r id version codename < <(vpkl_os)
  if [[ "$id" == debian ]]; then
    if [[ -z "${Kokkos_ROOT:-}" && "$version" != 12 ]]; then
      vpkl_die "this is Debian $version ($codename); Kokkos is built from Debian 12's packages only." \
        "${VPKL_OTHER_WAYS[@]}"
    fi
    vpkl_install_packages "${VPKL_PACKAGES[@]}"
  elif [[ -n "${Kokkos_ROOT:-}" ]]; then
    local tool
    for tool in cmake ninja mpiexec "${CXX:-g++}"; do
      command -v "$tool" >/dev/null 2>&1 ||
        vpkl_die "this is not Debian ($id $version), and $tool is missing; install it first." \
          "docs/install.md lists all dependencies."
    done
    vpkl_say "not Debian ($id $version): nothing is installed; CMake checks for the other dependencies"
  else
    vpkl_die "this set-up installs packages on Debian 12 only; this is $id $version." \
      "${VPKL_OTHER_WAYS[@]}"
  fi
  if [[ -n "${Kokkos_ROOT:-}" ]]; then
    vpkl_check_kokkos_root
  else
    vpkl_setup_kokkos
  fi
}

# --- configure, build, MPI ----------------------------------------------------

# vpkl_build PRESET [TARGET...]: configures and builds into build/PRESET.
vpkl_build() {
  local preset="$1"
  shift
  local start
  start="$(date +%s)"
  local log="$VPKL_SOURCE_DIR/build/$preset.configure.log"
  mkdir -p "$VPKL_SOURCE_DIR/build"
  vpkl_say "configuring build/$preset (preset $preset)"
  if ! (cd "$VPKL_SOURCE_DIR" && vpkl_quiet "$log" cmake --preset "$preset" -DCMAKE_CXX_COMPILER="${CXX:-g++}"); then
    vpkl_die "configuring failed; log: $log"
  fi
  vpkl_say "building build/$preset ($VPKL_JOBS jobs)"
  local targets=()
  if [[ $# -gt 0 ]]; then targets=(--target "$@"); fi
  cmake --build "$VPKL_SOURCE_DIR/build/$preset" -j "$VPKL_JOBS" "${targets[@]}" >&2 ||
    vpkl_die "the build of build/$preset failed"
  vpkl_say "build/$preset is up to date ($(($(date +%s) - start)) s)"
}

# Sets the array VPKL_MPI_FLAGS. Open MPI refuses more ranks than cores, and
# refuses root, unless it is told; other MPIs know neither flag. It also binds
# each of two ranks to one core, which would leave one OpenMP thread a rank.
vpkl_mpi_flags() {
  local version
  version="$(mpirun --version 2>&1 || true)"
  VPKL_MPI_FLAGS=()
  case "$version" in
    *"Open MPI) "[1-4].*) VPKL_MPI_FLAGS=(--oversubscribe --bind-to none) ;;
    *"Open MPI"*) VPKL_MPI_FLAGS=(--map-by :OVERSUBSCRIBE --bind-to none) ;;
    *) return 0 ;;
  esac
  if [[ "$(id -u)" -eq 0 ]]; then VPKL_MPI_FLAGS+=(--allow-run-as-root); fi
}
