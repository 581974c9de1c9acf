// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief The file driver through which vpkl reads HDF5 files.
#pragma once

#include <vpkl/io/hdf5.hpp>

namespace vpkl::impl {

/// \brief Registers a read-only driver with HDF5; HDF5 keeps it as long as a property list or file
/// uses it.
///
/// It reads with pread(2), takes no lock (locks fail on many cluster file systems, and a fixture
/// does not change once it has its name) and refuses damaged global heaps.
/// \return the driver's identifier, invalid if HDF5 refuses it
Hdf5Id register_read_driver();

}  // namespace vpkl::impl
