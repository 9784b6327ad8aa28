// SPDX-License-Identifier: Apache-2.0
// Computes a call's result: shapes that depend on all members' inputs, and memory for outputs whose size the
// caller could not know.
#pragma once

#include "control/protocol/message.h"
#include "data/backend/backend.h"
#include "runtime/calls/handles.h"
#include "runtime/calls/pending.h"
#include "runtime/calls/process_sets.h"

namespace farandole {

// Part::rows for a call, from the rows in its log entry.
std::vector<int64_t> rows_of(const std::vector<int64_t>& told, const Signature& signature,
                             int members);

// Shape and memory of a call's result. Uses the submission's output if it has one, and moves its shape out.
// `rows`: from rows_of().
Outcome outcome_of(const Signature& signature, const std::vector<int64_t>& rows,
                   const ProcessSet& set, Submission& mine,
                   const std::shared_ptr<GpuDevice>& device = nullptr);

}  // namespace farandole
