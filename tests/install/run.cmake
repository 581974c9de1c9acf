# SPDX-License-Identifier: Apache-2.0
# cmake -DSETTINGS=settings.cmake -DCASE=name -P run.cmake
cmake_minimum_required(VERSION 3.22)
include(${SETTINGS})

set(prefix ${WORK_DIR}/prefix)
set(build ${WORK_DIR}/${CASE})

# The consumer is told by CMAKE_PREFIX_PATH alone.
foreach(hint Kokkos_ROOT Kokkos_DIR KokkosKernels_ROOT vpkl_ROOT vpkl_DIR CMAKE_PREFIX_PATH)
  unset(ENV{${hint}})
endforeach()

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# configure_examples(prefix... [OPTIONS option...])
macro(configure_examples)
  cmake_parse_arguments(arg "" "" "OPTIONS" ${ARGN})
  file(REMOVE_RECURSE ${build})
  set(prefixes "${arg_UNPARSED_ARGUMENTS};${OTHER_PREFIXES}")
  execute_process(
    COMMAND ${CMAKE_COMMAND} -S ${VPKL_SOURCE_DIR}/docs/examples -B ${build} ${CONFIGURE}
            "-DCMAKE_PREFIX_PATH=${prefixes}" ${arg_OPTIONS}
            -DCMAKE_PROJECT_vpkl_examples_INCLUDE=${CMAKE_CURRENT_LIST_DIR}/features.cmake
    RESULT_VARIABLE status
    OUTPUT_VARIABLE output ERROR_VARIABLE output)
  message("${output}")
endmacro()

# build_and_run_examples(feature...): those that the vpkl in use must say it has.
function(build_and_run_examples)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "the examples could not be configured")
  endif()
  run(${CMAKE_COMMAND} --build ${build} --parallel 2)
  run(${build}/features ${VPKL_VERSION} ${ARGN})
  set(examples train)
  if(VPKL_ENABLE_C)
    list(APPEND examples train_c)
  endif()
  foreach(example IN LISTS examples)
    run(${build}/${example})
    if("MPI" IN_LIST ARGN)
      run(${MPIEXEC} 2 ${MPIEXEC_FLAGS} ${build}/${example})
    endif()
  endforeach()
endfunction()

if(CASE STREQUAL "prefix")
  file(REMOVE_RECURSE ${prefix})
  run(${CMAKE_COMMAND} --install ${VPKL_BINARY_DIR} --prefix ${prefix})
elseif(CASE STREQUAL "consumer")
  configure_examples(${prefix} ${KOKKOS_PREFIX} OPTIONS -DCMAKE_BUILD_TYPE=Release)
  build_and_run_examples(${FEATURES})
elseif(CASE STREQUAL "subdirectory")
  # What the installed one is not: shared (where Kokkos lets it be), and without MPI, HDF5 and NCCL.
  # Unoptimised, for its build time. The surrounding project says where installed libraries are looked for.
  configure_examples(${KOKKOS_PREFIX} OPTIONS -DCMAKE_BUILD_TYPE=Debug -DVPKL_SOURCE_DIR=${VPKL_SOURCE_DIR}
                     -DBUILD_SHARED_LIBS=${VPKL_ENABLE_C} -DVPKL_ENABLE_C=${VPKL_ENABLE_C}
                     -DVPKL_ENABLE_CUDA=${VPKL_ENABLE_CUDA} -DVPKL_ENABLE_MPI=OFF -DVPKL_ENABLE_HDF5=OFF
                     -DVPKL_ENABLE_APPS=OFF -DVPKL_ENABLE_TESTS=OFF
                     [[-DCMAKE_INSTALL_RPATH=$ORIGIN]] -DCMAKE_INSTALL_RPATH_USE_LINK_PATH=ON)
  list(REMOVE_ITEM FEATURES MPI HDF5 NCCL)
  build_and_run_examples(${FEATURES})
  # The same, installed.
  run(${CMAKE_COMMAND} --install ${build} --prefix ${WORK_DIR}/shared)
  set(build ${WORK_DIR}/shared_consumer)
  configure_examples(${WORK_DIR}/shared ${KOKKOS_PREFIX} OPTIONS -DCMAKE_BUILD_TYPE=Debug)
  build_and_run_examples(${FEATURES})
elseif(CASE STREQUAL "other_kokkos")
  set(other ${WORK_DIR}/kokkos-9)
  file(WRITE ${other}/lib/cmake/Kokkos/KokkosConfig.cmake
       "set(Kokkos_VERSION 9.9.9)\nset(Kokkos_DEVICES SERIAL)\nadd_library(Kokkos::kokkos INTERFACE IMPORTED)\n")
  configure_examples(${other} ${prefix})
  if(status EQUAL 0)
    message(FATAL_ERROR "a Kokkos of another version was accepted")
  endif()
  # CMake wraps the message.
  string(REGEX REPLACE "[ \n]+" " " output "${output}")
  if(NOT output MATCHES "vpkl was built with Kokkos .* holds 9.9.9 .SERIAL.")
    message(FATAL_ERROR "the refusal does not name both versions of Kokkos")
  endif()
else()
  message(FATAL_ERROR "CASE is '${CASE}', expected prefix, consumer, subdirectory or other_kokkos")
endif()
