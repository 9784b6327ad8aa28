// SPDX-License-Identifier: Apache-2.0
// Searches buffers for NaN and infinity, at about the speed of memory.
#pragma once

#include <cstddef>

#include "base/types.h"

namespace farandole::kernels {

// The first element that is not finite, or `elements`. Integers always are. Complex elements: either part.
size_t first_not_finite(DType dtype, const void* data, size_t elements);

}  // namespace farandole::kernels
