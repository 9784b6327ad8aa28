// SPDX-License-Identifier: Apache-2.0
// From what a user asks for to what travels: checks every argument of a request.
#pragma once

#include "runtime/calls/pending.h"
#include "runtime/calls/process_sets.h"

struct farandole_request;

namespace farandole {

struct Asked {
  Request request;
  Submission submission;  // without a handle yet
  // Of a kept request, after its first time; as PendingTable::check_free. Under the runtime's mutex.
  mutable std::shared_ptr<NamedRequest> record = {};
};

// The names that peers know the request by, even if the rest of it is wrong.
Request name_of_request(const farandole_request& asked);

// The set of a request, if this rank may submit to it. Throws Error(kInvalidArgument) if it is not in it,
// or has joined.
const ProcessSet& working_set(const Request& request, ProcessSets& sets);

// Throws Error(kInvalidArgument or kWrongType) that names the request and the remedy. Judges no buffers.
Asked take_in(const farandole_request& asked, ProcessSets& sets, Rank own);

// Throws Error(kInvalidArgument) where input and output overlap, unless the call is in place, as farandole.h
// says. Of outputs whose size only negotiation knows it judges what this rank is sure of.
void check_buffers(const Request& request, const Submission& mine, const ProcessSet& set);

// What rides along with the report: sizes, and the bytes themselves if they are few. Points into the
// user's buffer.
Contribution contribution_of(const Request& request, const Submission& mine, Rank own);

}  // namespace farandole
