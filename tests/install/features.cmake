# SPDX-License-Identifier: Apache-2.0
# Included by project(vpkl_examples): adds a program that knows what the vpkl it meets was built with.
add_executable(features ${CMAKE_CURRENT_LIST_DIR}/features.cpp)
target_link_libraries(features PRIVATE vpkl::vpkl)
