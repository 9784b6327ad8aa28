// SPDX-License-Identifier: Apache-2.0
// A submission as parts of a bucket, for backends and kernels, or as input of a cell. Used by RankCalls.
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

// True if a cell can carry this call, and this rank's buffers are present.
bool fits_cell(const Signature& signature, const Submission& mine, const ProcessSet& set);
std::span<const std::byte> input_in_cell(const Part& part, int member);
// Computes the result from all inputs in member order, after all have met.
void complete(const Part& part, const ProcessSet& set, const Cell& cell);

// Describes one tensor to the lane. Without a submission (this rank has joined) the part has no buffers.
Part part_of(const PartInputs& inputs, const Signature& signature, const ProcessSet& set,
             const Submission* mine);
std::vector<Item> items_of(const Run& run);
// Names a bucket's calls for a profiler.
std::string label_of(uint64_t bucket, std::span<const Item> items, const PendingTable& pending);
Outcome outcome_of(const Signature& signature, const std::vector<int64_t>& rows,
                   const ProcessSet& set, Submission& mine,
                   const std::shared_ptr<GpuDevice>& device);

}  // namespace farandole
