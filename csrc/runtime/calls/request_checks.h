// SPDX-License-Identifier: Apache-2.0
// Turns a user's request into what is sent: checks every argument. Used by Submitter.
#pragma once

#include "runtime/calls/pending.h"
#include "runtime/calls/process_sets.h"

struct farandole_request;

namespace farandole {

struct CheckedCall {
  Request request;
  Submission submission;  // without a handle yet
  // Of a persistent request: cache for PendingTable::check_free(). Under RankCalls::mutex.
  mutable std::shared_ptr<NamedRequest> record = {};
};

// The names by which peers know the request, even if the rest of it is invalid.
Request name_of_request(const farandole_request& raw);

// The set of a request. Throws Error(kInvalidArgument) if this rank is no member or has joined.
const ProcessSet& working_set(const Request& request, ProcessSets& sets);

// Throws Error(kInvalidArgument or kWrongType) naming the request and the remedy. Does not check buffers.
CheckedCall check_request(const farandole_request& raw, ProcessSets& sets, Rank own);

// Throws Error(kInvalidArgument) if input and output overlap, except in place as farandole.h allows. For
// outputs sized by negotiation, checks only the bytes known locally.
void check_buffers(const Request& request, const Submission& mine, const ProcessSet& set);

// What is sent with the report: row counts and, if small, the input itself, as a pointer into the user's
// buffer.
Contribution contribution_of(const Request& request, const Submission& mine, Rank own);

}  // namespace farandole
