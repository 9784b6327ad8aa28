// SPDX-License-Identifier: Apache-2.0
// Turns a user's request into a Request. Checks every argument and, if configured, the inputs for NaN and infinity.
#pragma once

#include <span>

#include "runtime/calls/tables.h"

struct farandole_request;

namespace farandole {

struct CheckedCall {
  Request request;
  Submission submission;  // has no handle yet
  std::string site = {};  // source line of the user's program that makes the call; empty if unknown
  // Caches used by PendingTable::check_free() and definition_of(). RankCalls::mutex_ guards them.
  mutable std::shared_ptr<NamedRequest> record = {};
  mutable FoundId found = {};
};

// Returns the fields of a request that identify the call to peers. The other fields may be invalid.
Request name_of_request(const farandole_request& raw);

// Returns a text such as "allreduce 'x'".
std::string title_of(const Request& request);

// Returns the set of a request. Throws Error(kInvalidArgument) if this rank is not a member of the set, or has called
// join() on it.
const ProcessSet& working_set(const Request& request, ProcessSets& sets);

// Makes one call of these tensors. If `count` is 0, the call is an empty group, whose name is in raw[0]. Throws
// Error(kInvalidArgument or kWrongType), whose text names a remedy. Does not check buffers. `set` is the working_set()
// of raw[0].
CheckedCall check_call(std::span<const farandole_request> raw, size_t count, const ProcessSet& set,
                       Rank own);

// Throws Error(kInvalidArgument) if a message has no buffer, if a reduce op without a kernel has an input, or if input
// and output overlap in a way that farandole.h does not allow. `mine` is the submission of this part.
void check_buffers(const Request& request, size_t part, const Submission& mine,
                   const ProcessSet& set);

// Returns the content of the call's report: the row counts and, if the input has at most `most_payload` bytes, a
// pointer to the input in the user's buffer.
Contribution contribution_of(const Signature& signature, const Submission& mine, Rank own,
                             size_t most_payload);

// For FARANDOLE_CHECK_NUMERICS. Returns a failure that names the first NaN or infinity in the input, or kOk if none.
Failure numerics_of(const Request& request, size_t part, const Submission& mine, Rank own);

}  // namespace farandole
