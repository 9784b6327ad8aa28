// SPDX-License-Identifier: Apache-2.0
// farandole.h with a guard and C linkage; it has neither itself, because cffi reads it as it is.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
#include "farandole.h"
}
