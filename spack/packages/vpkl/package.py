# SPDX-License-Identifier: Apache-2.0
import os

from spack.package import *

try:  # Spack 1.x; Spack 0.23 has them in spack.package
    from spack_repo.builtin.build_systems.cmake import CMakePackage, generator
    from spack_repo.builtin.build_systems.cuda import CudaPackage
except ImportError:
    pass


class Vpkl(CMakePackage, CudaPackage):
    """Full-vocabulary knowledge distillation losses over sharded vocabularies,
    value and gradient, on Kokkos."""

    # No release and no public address yet: the source is the checkout that
    # this file lies in, <checkout>/spack/packages/vpkl/package.py. A plain
    # "spack install" takes the committed branch main of it; "spack develop",
    # as in the environments, takes the working tree.
    git = "file://" + os.path.realpath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))

    test_requires_compiler = True

    license("Apache-2.0")

    version("main", branch="main")

    variant("shared", default=True, description="Build libvpkl as a shared library")
    variant("c", default=True, description="C interface, a shared library")
    variant("mpi", default=True, description="MPI communicators")
    variant("hdf5", default=True, description="Rollout fixtures (HDF5)")
    variant("apps", default=True, when="+hdf5", description="Programs vpkl-*")
    variant("plots", default=False, when="+apps", description="Plots of vpkl-report (Matplotlib)")
    variant("openmp", default=True, description="OpenMP execution space")
    variant("nccl", default=False, when="+cuda", description="NCCL communicators")
    variant("nvtx", default=False, when="+cuda", description="NVTX ranges")
    # One architecture, as Kokkos has it: a second one is refused by name.
    variant(
        "cuda_arch",
        default="none",
        values=("none",) + CudaPackage.cuda_arch_values,
        multi=False,
        sticky=True,
        when="+cuda",
        description="CUDA architecture",
    )

    generator("ninja")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("cmake@3.22:", type="build")

    # 3.4.1 and 4.6 are tested. The builtin package of Spack 1.x starts at 3.7;
    # an older one is an external.
    depends_on("kokkos@3.4:5")
    depends_on("kokkos+openmp", when="+openmp")
    depends_on("kokkos+serial", when="~openmp")
    # libvpkl, or the C interface around a static libvpkl, is a shared library.
    depends_on("kokkos+pic", when="+shared")
    depends_on("kokkos+pic", when="+c")

    conflicts(
        "cuda_arch=none",
        when="+cuda",
        msg="vpkl+cuda needs the GPU's architecture, e.g. cuda_arch=90 for H100 and H200",
    )
    for _arch in CudaPackage.cuda_arch_values:
        depends_on(f"kokkos+cuda cuda_arch={_arch}", when=f"+cuda cuda_arch={_arch}")
        depends_on(f"nccl cuda_arch={_arch}", when=f"+nccl cuda_arch={_arch}")
    # Kokkos 5 has no such option: lambdas are always on.
    conflicts("^kokkos~cuda_lambda", when="+cuda", msg="vpkl+cuda needs kokkos+cuda_lambda")
    # Device code goes through nvcc_wrapper; Clang as the CUDA compiler is untested.
    depends_on("kokkos+wrapper", when="+cuda")
    conflicts("^kokkos@:4.7.0", when="+cuda ^cuda@13:", msg="CUDA 13 needs Kokkos 4.7.1 or later")
    conflicts("%gcc@:8", msg="vpkl needs g++ 9 or later")

    # The matrix products of the programs; on CUDA they are cuBLAS'.
    depends_on("kokkos-kernels@3.4:5 +blas", when="+apps ~cuda")
    depends_on("kokkos-kernels+openmp", when="+apps ~cuda +openmp")

    depends_on("fmt@8:")
    depends_on("nlohmann-json@3:")
    depends_on("openssl@1.1:")
    depends_on("mpi", when="+mpi")
    depends_on("nccl@2.14:", when="+nccl")
    # The serial library is enough, beside MPI too: a parallel one is accepted,
    # not asked for.
    depends_on("hdf5@1.10:", when="+hdf5")
    depends_on("cli11@2:", type="build", when="+apps")
    # vpkl-sweep and vpkl-report are Python scripts.
    depends_on("python@3.9:", type="run", when="+apps")
    depends_on("py-matplotlib@3.6:", type="run", when="+plots")

    depends_on("googletest@1.11:", type="test")
    depends_on("python@3.9:", type="test")

    @property
    def sanity_check_is_file(self):
        files = [
            join_path("include", "vpkl", "config.hpp"),
            join_path("lib", "cmake", "vpkl", "vpklConfig.cmake"),
        ]
        if self.spec.satisfies("+c"):
            files.append(join_path("include", "vpkl.h"))
        if self.spec.satisfies("+apps"):
            files += [join_path("bin", "vpkl-fixture"), join_path("bin", "vpkl-replay")]
        return files

    @property
    def kokkos_compiler(self):
        """The compiler that Kokkos' package names: nvcc_wrapper with CUDA."""
        # Spack 0.23 sets it on the spec, Spack 1.x has it on the package.
        kokkos = self.spec["kokkos"]
        if hasattr(kokkos, "kokkos_cxx"):
            return kokkos.kokkos_cxx
        return self["kokkos"].kokkos_cxx

    def cmake_args(self):
        spec = self.spec
        kokkos_kernels = spec.satisfies("+apps ~cuda")
        args = [
            self.define("CMAKE_CXX_COMPILER", self.kokkos_compiler),
            self.define("CMAKE_INSTALL_LIBDIR", "lib"),
            self.define("Kokkos_ROOT", spec["kokkos"].prefix),
            self.define_from_variant("BUILD_SHARED_LIBS", "shared"),
            self.define_from_variant("VPKL_ENABLE_MPI", "mpi"),
            self.define_from_variant("VPKL_ENABLE_HDF5", "hdf5"),
            self.define("VPKL_ENABLE_KOKKOS_KERNELS", kokkos_kernels),
            self.define_from_variant("VPKL_ENABLE_CUDA", "cuda"),
            self.define("VPKL_ENABLE_NCCL", spec.satisfies("+nccl")),
            self.define("VPKL_ENABLE_NVTX", spec.satisfies("+nvtx")),
            self.define_from_variant("VPKL_ENABLE_C", "c"),
            self.define("VPKL_ENABLE_APPS", spec.satisfies("+apps")),
            self.define("VPKL_ENABLE_TESTS", self.run_tests),
            self.define("VPKL_ENABLE_BENCHMARKS", False),
        ]
        if spec.satisfies("^kokkos@5:"):
            args.append(self.define("CMAKE_CXX_STANDARD", "20"))
        if kokkos_kernels:
            args.append(self.define("KokkosKernels_ROOT", spec["kokkos-kernels"].prefix))
        if spec.satisfies("+nccl"):
            args.append(self.define("NCCL_ROOT", spec["nccl"].prefix))
        if spec.satisfies("+nvtx"):
            # NVTX 3 comes with the toolkit.
            args.append(self.define("VPKL_NVTX_INCLUDE_DIR", spec["cuda"].prefix.include))
        if self.run_tests:
            args.append(self.define("VPKL_PYTHON", spec["python"].command.path))
            # Not all tests are built: see build_targets.
            args.append(self.define("CMAKE_SKIP_INSTALL_ALL_DEPENDENCY", True))
        return args

    @property
    def quick_tests(self):
        """The test programs of "spack install --test=root": each layer once,
        without the fuzz and training tests, whose templates compile for many
        minutes, and without those that build vpkl again (install_*)."""
        tests = [
            "test_core",
            "test_vocab",
            "test_loss",
            "test_parallel",
            "test_divergence",
            "test_teacher",
        ]
        if self.spec.satisfies("+hdf5"):
            tests.append("test_rollout_fixture")
        if self.spec.satisfies("+c"):
            tests.append("test_capi")
        if self.spec.satisfies("+apps"):
            tests.append("test_app_gemm")
        return tests

    @property
    def build_targets(self):
        if not self.run_tests:
            return []
        targets = ["vpkl"]
        if self.spec.satisfies("+c"):
            targets.append("vpkl_c")
        if self.spec.satisfies("+apps"):
            targets += ["vpkl-fixture", "vpkl-replay", "vpkl-transfer"]
        return targets + self.quick_tests

    def check(self):
        """Run the quick tests, under MPI on one and two ranks."""
        with working_dir(self.builder.build_directory):
            ctest = Executable(self.spec["cmake"].prefix.bin.ctest)
            names = "|".join(self.quick_tests)
            ctest("-R", f"^({names})(_np[12])?$", "--output-on-failure", "--no-tests=error")

    examples_dir = join_path("docs", "examples")
    fixture = join_path("fixtures", "smollm2-135m.h5")

    @run_after("install")
    def keep_test_sources(self):
        sources = [self.examples_dir]
        if self.spec.satisfies("+apps"):
            sources.append(self.fixture)
        cache_extra_test_sources(self, sources)

    def skip_without_gpu(self):
        if self.spec.satisfies("+cuda") and not os.path.exists("/dev/nvidiactl"):
            raise SkipTest("no GPU here")

    def test_examples(self):
        """build the examples with find_package(vpkl) and run them, in C++ and in C"""
        spec = self.spec
        source = join_path(self.test_suite.current_test_cache_dir, self.examples_dir)
        prefixes = [dep.prefix for dep in spec.traverse(deptype="link")]
        cmake = spec["cmake"].command
        with working_dir("build-examples", create=True):
            cmake(
                source,
                "-GNinja",
                self.define("CMAKE_MAKE_PROGRAM", spec["ninja"].command.path),
                self.define("CMAKE_BUILD_TYPE", "Release"),
                self.define("CMAKE_CXX_COMPILER", self.kokkos_compiler),
                self.define("CMAKE_PREFIX_PATH", prefixes),
            )
            cmake("--build", ".")
            self.skip_without_gpu()
            Executable("./train")()
            if spec.satisfies("+c"):
                Executable("./train_c")()

    def test_fixture(self):
        """verify a fixture and replay two updates of it"""
        if self.spec.satisfies("~apps") or self.spec.satisfies("~hdf5"):
            raise SkipTest("built without the programs")
        fixture = join_path(self.test_suite.current_test_cache_dir, self.fixture)
        Executable(join_path(self.prefix.bin, "vpkl-fixture"))("verify", fixture)
        self.skip_without_gpu()
        replay = Executable(join_path(self.prefix.bin, "vpkl-replay"))
        options = "--batch-size 2 --warmup-updates 0 --measure-updates 2 --repetitions 1"
        replay("--fixture", fixture, "--output-jsonl", "replay.jsonl", *options.split())
