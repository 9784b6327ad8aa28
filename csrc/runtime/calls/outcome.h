// SPDX-License-Identifier: Apache-2.0
// What a call leaves behind: shapes that follow from what all members brought, and memory for outputs
// that the caller could not allocate.
#pragma once

#include "control/protocol/message.h"
#include "data/plane/plane.h"
#include "runtime/calls/handles.h"
#include "runtime/calls/pending.h"
#include "runtime/calls/process_sets.h"

namespace farandole {

// Part::rows for a call of which the log has told these.
std::vector<int64_t> rows_of(const std::vector<int64_t>& told, const Signature& signature,
                             int members);

// Shape and memory of a call's result; uses the submission's output if it has one, and its shape up.
// rows: as rows_of().
Outcome outcome_of(const Signature& signature, const std::vector<int64_t>& rows,
                   const ProcessSet& set, Submission& mine,
                   const std::shared_ptr<GpuDevice>& device = nullptr);

}  // namespace farandole
