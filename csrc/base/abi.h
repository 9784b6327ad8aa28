// SPDX-License-Identifier: Apache-2.0
// Includes farandole.h with a guard and C linkage, which cffi could not read there.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
#include "farandole.h"
}
