// SPDX-License-Identifier: Apache-2.0
// Turns submissions into parts of a bucket or into inputs of a cell. Used by RankCalls.
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

// True if this call can complete in a cell and this rank has passed the buffers that the call needs.
bool fits_cell(const Signature& signature, const Submission& mine, const ProcessSet& set);
std::span<const std::byte> input_in_cell(const Part& part, int member);
// Computes the result from all inputs in the cell, in member order. Call it after Cell::meet().
void complete(const Part& part, const ProcessSet& set, const Cell& cell);

// Makes the Part of one tensor. `mine` is null if this rank has joined; in that case, the part has no buffers.
Part part_of(const PartInputs& inputs, const Signature& signature, const ProcessSet& set,
             const Submission* mine);
std::vector<Item> items_of(const Run& run);
// Returns a text that names a bucket's calls, for a profiler.
std::string label_of(uint64_t bucket, std::span<const Item> items, const PendingTable& pending);
Outcome outcome_of(const Signature& signature, const std::vector<int64_t>& rows,
                   const ProcessSet& set, Submission& mine,
                   const std::shared_ptr<GpuDevice>& device);

}  // namespace farandole
