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

# configure_consumer(prefix... [OPTIONS option...])
macro(configure_consumer)
  cmake_parse_arguments(arg "" "" "OPTIONS" ${ARGN})
  file(REMOVE_RECURSE ${build})
  set(prefixes "${arg_UNPARSED_ARGUMENTS};${OTHER_PREFIXES}")
  execute_process(
    COMMAND ${CMAKE_COMMAND} -S ${VPKL_SOURCE_DIR}/tests/install/consumer -B ${build} ${CONFIGURE}
            "-DCMAKE_PREFIX_PATH=${prefixes}" ${arg_OPTIONS}
    RESULT_VARIABLE status
    OUTPUT_VARIABLE output ERROR_VARIABLE output)
  message("${output}")
endmacro()

function(build_and_run_consumer)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "the consumer could not be configured")
  endif()
  run(${CMAKE_COMMAND} --build ${build} --parallel 2)
  run(${build}/consumer)
  run(${build}/consumer_c)
endfunction()

if(CASE STREQUAL "prefix")
  file(REMOVE_RECURSE ${prefix})
  run(${CMAKE_COMMAND} --install ${VPKL_BINARY_DIR} --prefix ${prefix})
elseif(CASE STREQUAL "consumer")
  configure_consumer(${prefix} ${KOKKOS_PREFIX} OPTIONS -DCMAKE_BUILD_TYPE=Release)
  build_and_run_consumer()
elseif(CASE STREQUAL "subdirectory")
  # Without the optional features, which the installed one has; unoptimised, for its build time.
  configure_consumer(${KOKKOS_PREFIX} OPTIONS -DCMAKE_BUILD_TYPE=Debug -DVPKL_SOURCE_DIR=${VPKL_SOURCE_DIR}
                     -DVPKL_ENABLE_APPS=OFF -DVPKL_ENABLE_TESTS=OFF -DVPKL_ENABLE_MPI=OFF
                     -DVPKL_ENABLE_HDF5=OFF)
  build_and_run_consumer()
elseif(CASE STREQUAL "other_kokkos")
  set(other ${WORK_DIR}/kokkos-9)
  file(WRITE ${other}/lib/cmake/Kokkos/KokkosConfig.cmake
       "set(Kokkos_VERSION 9.9.9)\nset(Kokkos_DEVICES SERIAL)\nadd_library(Kokkos::kokkos INTERFACE IMPORTED)\n")
  configure_consumer(${other} ${prefix})
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
