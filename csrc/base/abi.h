// SPDX-License-Identifier: Apache-2.0
// Includes farandole.h with an include guard and C linkage. Neither can be in farandole.h, because cffi cannot parse
// them.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
#include "farandole.h"
}
