# SPDX-License-Identifier: Apache-2.0
# Helpers that every target of this project goes through.

# Warnings and sanitizers. -ffp-contract=off: a row's bits must not depend on which function the
# compiler inlined the arithmetic into.
function(vpkl_target_defaults target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -ffp-contract=off)
  if(VPKL_WARNINGS_AS_ERRORS)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  foreach(sanitizer IN LISTS VPKL_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${sanitizer} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_link_options(${target} PUBLIC -fsanitize=${sanitizer})
  endforeach()
endfunction()

# vpkl_add_app(name source...): an installed program.
function(vpkl_add_app name)
  find_package(CLI11 REQUIRED)
  add_executable(${name} ${ARGN})
  vpkl_target_defaults(${name})
  target_link_libraries(${name} PRIVATE vpkl::vpkl CLI11::CLI11 fmt::fmt nlohmann_json::nlohmann_json)
  install(TARGETS ${name} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endfunction()

# Open MPI refuses root and more ranks than cores unless told.
if(VPKL_ENABLE_MPI)
  set(VPKL_MPIEXEC_FLAGS "" CACHE STRING "Flags for mpiexec in tests")
  if(NOT VPKL_MPIEXEC_FLAGS)
    execute_process(COMMAND mpirun --version OUTPUT_VARIABLE mpirun_version ERROR_QUIET)
    if(mpirun_version MATCHES "Open MPI")
      set(VPKL_MPIEXEC_FLAGS "--allow-run-as-root;--oversubscribe;--bind-to;none" CACHE STRING "Flags for mpiexec in tests" FORCE)
    endif()
  endif()
endif()

# vpkl_add_test(NAME n SOURCES ... [LIBRARIES ...] [RANKS 1 2 3 4] [TIMEOUT s] [MAIN custom])
# One GoogleTest binary; with RANKS it runs under MPI once for each size, and in builds with NCCL once
# more over NCCL, skipped where ranks share a GPU. Ranks and threads outnumber cores, so waiting
# threads sleep.
function(vpkl_add_test)
  cmake_parse_arguments(arg "" "NAME;TIMEOUT" "SOURCES;LIBRARIES;RANKS" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  if(VPKL_SANITIZE)
    math(EXPR arg_TIMEOUT "4 * ${arg_TIMEOUT}")
  endif()
  add_executable(${arg_NAME} ${arg_SOURCES})
  vpkl_target_defaults(${arg_NAME})
  target_link_libraries(${arg_NAME} PRIVATE vpkl_test_main vpkl::vpkl fmt::fmt ${arg_LIBRARIES})
  set(properties TIMEOUT ${arg_TIMEOUT} PROCESSORS 2)
  set(environment "OMP_NUM_THREADS=2;OMP_PROC_BIND=false;OMP_WAIT_POLICY=passive")
  if(arg_RANKS)
    foreach(ranks IN LISTS arg_RANKS)
      if(VPKL_ENABLE_MPI)
        set(command ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${ranks} ${VPKL_MPIEXEC_FLAGS}
                    $<TARGET_FILE:${arg_NAME}>)
      elseif(ranks EQUAL 1)
        set(command ${arg_NAME})
      else()
        continue()
      endif()
      add_test(NAME ${arg_NAME}_np${ranks} COMMAND ${command})
      set_tests_properties(${arg_NAME}_np${ranks} PROPERTIES ${properties} ENVIRONMENT "${environment}")
      if(VPKL_ENABLE_NCCL)
        add_test(NAME ${arg_NAME}_over_nccl_np${ranks} COMMAND ${command})
        set_tests_properties(${arg_NAME}_over_nccl_np${ranks} PROPERTIES ${properties} SKIP_RETURN_CODE 77
                             ENVIRONMENT "${environment};VPKL_TEST_TRANSPORT=nccl")
      endif()
    endforeach()
  else()
    add_test(NAME ${arg_NAME} COMMAND ${arg_NAME})
    set_tests_properties(${arg_NAME} PROPERTIES ${properties} ENVIRONMENT "${environment}")
  endif()
endfunction()
