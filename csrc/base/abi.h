// SPDX-License-Identifier: Apache-2.0
// The C ABI. farandole.h itself has no guard, since cffi reads it as it is.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
#include "farandole.h"
}
