// SPDX-License-Identifier: Apache-2.0
// Turns a user's request into a Request. Checks every argument and, if configured, inputs for NaN and infinity.
#pragma once

#include <span>

#include "runtime/calls/tables.h"

struct farandole_request;

namespace farandole {

struct CheckedCall {
  Request request;
  Submission submission;  // has no handle yet
  std::string site = {};  // program line of the call; empty: unknown
  // Caches of PendingTable::check_free() and definition_of(). RankCalls::mutex_ guards them.
  mutable std::shared_ptr<NamedRequest> record = {};
  mutable FoundId found = {};
};

// Returns the parts of a request that identify the call to peers. The other parts may be invalid.
Request name_of_request(const farandole_request& raw);

// "allreduce 'x'"
std::string title_of(const Request& request);

// Returns the set of a request. Throws Error(kInvalidArgument) if this rank is not a member, or has joined.
const ProcessSet& working_set(const Request& request, ProcessSets& sets);

// Makes the call of these tensors. `count` 0: an empty group, whose name is in raw[0]. Throws
// Error(kInvalidArgument or kWrongType), with a remedy. Does not check buffers. `set`: working_set() of raw[0].
CheckedCall check_call(std::span<const farandole_request> raw, size_t count, const ProcessSet& set,
                       Rank own);

// Throws Error(kInvalidArgument) if a message has no buffer, if a reduce op without a kernel has an input, or if input
// and output overlap in a way that farandole.h does not allow. `mine`: this part's submission.
void check_buffers(const Request& request, size_t part, const Submission& mine,
                   const ProcessSet& set);

// Content of the report: row counts and, up to `most_payload` bytes, the input as a pointer into the user's buffer.
Contribution contribution_of(const Signature& signature, const Submission& mine, Rank own,
                             size_t most_payload);

// For FARANDOLE_CHECK_NUMERICS: a failure that names the first NaN or infinity in the input; kOk: there is none.
Failure numerics_of(const Request& request, size_t part, const Submission& mine, Rank own);

}  // namespace farandole
