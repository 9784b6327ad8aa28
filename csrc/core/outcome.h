// SPDX-License-Identifier: Apache-2.0
// What a call leaves behind: shapes that follow from what all members brought, and memory for outputs
// that the caller could not allocate.
#pragma once

#include "control/message.h"
#include "core/handles.h"
#include "core/pending.h"
#include "core/process_sets.h"
#include "data/plane.h"

namespace farandole {

// Part::rows for this call.
std::vector<int64_t> rows_of(const Item& item, const Signature& signature, int members);

// Shape and memory of the result of `part`; uses the submission's output if it has one.
Outcome outcome_of(const Part& part, const ProcessSet& set, const Submission& mine,
                   const std::shared_ptr<GpuDevice>& device = nullptr);

}  // namespace farandole
