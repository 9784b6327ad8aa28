// SPDX-License-Identifier: Apache-2.0
// How much memory is left.
#pragma once

#include <cstddef>

namespace farandole {

// Bytes that this process may still allocate before the kernel starts to end processes: what the host has
// and every control group above the process allows, caches not counted as used.
size_t available_memory();

}  // namespace farandole
