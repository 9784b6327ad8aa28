// SPDX-License-Identifier: Apache-2.0
// The C ABI. farandole.h itself has no guard, since cffi reads it as it is.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/collective.h"
#include "base/reduce_op.h"

extern "C" {
#include "farandole.h"
}

// The header's values are those of our enums: each last one stands for its list.
static_assert(FARANDOLE_SCATTER + 1 == farandole::kOpCount);
static_assert(FARANDOLE_PRODUCT + 1 == farandole::kReduceOpCount);
static_assert(FARANDOLE_FLOAT8_E5M2 + 1 == farandole::kDTypeCount);
