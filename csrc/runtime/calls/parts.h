// SPDX-License-Identifier: Apache-2.0
// A call as parts of a bucket, or in a cell: what backends and kernels need to know of a submission. Used by RankCalls.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "control/protocol/message.h"
#include "data/backend/backend.h"
#include "data/shm/cell.h"
#include "runtime/calls/tables.h"

namespace farandole {

// True if a cell carries such a call, and this rank's buffers are there.
bool fits_cell(const Signature& signature, const Submission& mine, const ProcessSet& set);
// The bytes that this member brings to the cell.
std::span<const std::byte> input_in_cell(const Part& part, int member);
// After all have met: the result, from all inputs in member order.
void complete(const Part& part, const ProcessSet& set, const Cell& cell);

// Describes one tensor to the lane. Without a submission (this rank has joined) the part has no buffers.
Part part_of(const PartInputs& inputs, const Signature& signature, const ProcessSet& set,
             const Submission* mine);
std::vector<Item> items_of(const Run& run);
// Names the calls of a bucket, for a profiler.
std::string label_of(uint64_t bucket, std::span<const Item> items, const PendingTable& pending);
Outcome outcome_of(const Signature& signature, const std::vector<int64_t>& rows,
                   const ProcessSet& set, Submission& mine,
                   const std::shared_ptr<GpuDevice>& device);

}  // namespace farandole
