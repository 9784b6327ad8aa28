// SPDX-License-Identifier: Apache-2.0
// Includes farandole.h with an include guard and C linkage, which cffi could not parse in farandole.h itself.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
#include "farandole.h"
}
