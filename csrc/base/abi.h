// SPDX-License-Identifier: Apache-2.0
// farandole.h with a guard and C linkage; it has neither itself, because cffi reads it as it is.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/collective.h"
#include "base/reduce_op.h"

extern "C" {
#include "farandole.h"
}

// The header's values must equal those of our enums; comparing the last of each list checks the list.
static_assert(FARANDOLE_RECEIVE + 1 == farandole::kOpCount);
static_assert(FARANDOLE_PRODUCT + 1 == farandole::kReduceOpCount);
static_assert(FARANDOLE_FLOAT8_E5M2 + 1 == farandole::kDTypeCount);
