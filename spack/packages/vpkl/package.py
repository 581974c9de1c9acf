# SPDX-License-Identifier: Apache-2.0
try:  # Spack 1.x
    from spack_repo.builtin.build_systems.cmake import CMakePackage
    from spack_repo.builtin.build_systems.cuda import CudaPackage
except ImportError:  # Spack 0.23
    from spack.build_systems.cmake import CMakePackage
    from spack.build_systems.cuda import CudaPackage

from spack.package import *


class Vpkl(CMakePackage, CudaPackage):
    """Full-vocabulary knowledge distillation losses over sharded vocabularies,
    on Kokkos."""

    license("Apache-2.0")

    # No release yet: build a checkout with "spack dev-build vpkl@main".
    version("main")

    variant("shared", default=True, description="Build shared libraries")
    variant("mpi", default=True, description="MPI communicators")
    variant("nccl", default=False, when="+cuda", description="NCCL communicators")
    variant("hdf5", default=True, description="Rollout fixtures (HDF5)")
    variant("nvtx", default=False, when="+cuda", description="NVTX ranges")
    variant("openmp", default=True, description="OpenMP execution space")
    variant("tests", default=False, description="Build the tests")

    depends_on("cxx", type="build")
    depends_on("cmake@3.22:", type="build")
    depends_on("pkgconfig", type="build")

    # Builtin kokkos starts at 3.7.
    depends_on("kokkos@3.7:")
    depends_on("kokkos+openmp", when="+openmp")
    depends_on("kokkos+serial", when="~openmp")
    depends_on("kokkos+pic", when="+shared")
    depends_on("kokkos-kernels@3.7: +blas", when="~cuda")
    depends_on("kokkos-kernels+openmp", when="~cuda+openmp")

    for _arch in CudaPackage.cuda_arch_values:
        depends_on(f"kokkos+cuda cuda_arch={_arch}", when=f"+cuda cuda_arch={_arch}")
    conflicts("+cuda", when="cuda_arch=none", msg="+cuda needs cuda_arch=<number>")
    depends_on("kokkos+cuda_lambda", when="+cuda ^kokkos@:4")
    depends_on("kokkos+wrapper", when="+cuda %gcc")
    depends_on("kokkos@4.7.1:", when="+cuda ^cuda@13:")

    depends_on("fmt@8:")
    depends_on("nlohmann-json@3:")
    depends_on("openssl@1.1:")
    depends_on("cli11@2:")
    depends_on("mpi", when="+mpi")
    depends_on("nccl", when="+nccl")
    # The serial HDF5 library is enough, beside MPI too: a parallel one is
    # accepted, not asked for.
    depends_on("hdf5@1.10:", when="+hdf5")
    depends_on("nvtx@3: ~python", when="+nvtx")
    depends_on("googletest@1.11: +gmock", when="+tests")

    sanity_check_is_file = [join_path("include", "vpkl", "config.hpp")]
    sanity_check_is_dir = ["include", "lib"]

    test_requires_compiler = True

    def setup_run_environment(self, env):
        env.prepend_path("PATH", self.prefix.bin)

    def cmake_args(self):
        spec = self.spec
        args = [
            self.define("CMAKE_CXX_COMPILER", self["kokkos"].kokkos_cxx),
            self.define("CMAKE_INSTALL_LIBDIR", "lib"),
            self.define("Kokkos_ROOT", spec["kokkos"].prefix),
            self.define_from_variant("BUILD_SHARED_LIBS", "shared"),
            self.define_from_variant("VPKL_ENABLE_MPI", "mpi"),
            self.define("VPKL_ENABLE_NCCL", spec.satisfies("+nccl")),
            self.define_from_variant("VPKL_ENABLE_CUDA", "cuda"),
            self.define_from_variant("VPKL_ENABLE_HDF5", "hdf5"),
            self.define("VPKL_ENABLE_NVTX", spec.satisfies("+nvtx")),
            self.define("VPKL_ENABLE_CUPTI", False),
            self.define("VPKL_ENABLE_KOKKOS_KERNELS", spec.satisfies("~cuda")),
            self.define_from_variant("VPKL_ENABLE_TESTS", "tests"),
            self.define("VPKL_ENABLE_BENCHMARKS", False),
            # The programs read and write fixtures.
            self.define("VPKL_ENABLE_APPS", spec.satisfies("+hdf5")),
        ]
        if spec.satisfies("~cuda"):
            args.append(self.define("KokkosKernels_ROOT", spec["kokkos-kernels"].prefix))
        return args

    # Stand-alone test: the consumer project of the test suite, built against
    # the installed package.
    consumer_dir = join_path("tests", "install", "consumer")

    @run_after("install")
    def keep_consumer(self):
        cache_extra_test_sources(self, [self.consumer_dir])

    def test_consumer(self):
        """build and run a project that does find_package(vpkl)"""
        source = join_path(self.test_suite.current_test_cache_dir, self.consumer_dir)
        cmake = self.spec["cmake"].command
        with working_dir("build-consumer", create=True):
            cmake(
                source,
                self.define("CMAKE_CXX_COMPILER", self["kokkos"].kokkos_cxx),
                self.define("CMAKE_PREFIX_PATH", get_cmake_prefix_path(self)),
                self.define("vpkl_ROOT", self.prefix),
                self.define("Kokkos_ROOT", self.spec["kokkos"].prefix),
            )
            cmake("--build", ".")
            ctest = which(self.spec["cmake"].prefix.bin.ctest)
            ctest("--output-on-failure", "--no-tests=error")
