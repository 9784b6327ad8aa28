// SPDX-License-Identifier: Apache-2.0
// Turns a user's request into what is sent: checks every argument, and inputs for NaN and infinity if that is wanted.
// Used by Runtime and RankCalls.
#pragma once

#include <span>

#include "runtime/calls/tables.h"

struct farandole_request;

namespace farandole {

struct CheckedCall {
  Request request;
  Submission submission;  // without a handle yet
  std::string site = {};  // where the program makes it; empty: not known
  // Caches of a prepared call for PendingTable::check_free() and definition_of(). Under RankCalls::mutex_.
  mutable std::shared_ptr<NamedRequest> record = {};
  mutable FoundId found = {};
};

// The names by which peers know the request, even if the rest of it is invalid.
Request name_of_request(const farandole_request& raw);

// "allreduce 'x'"
std::string title_of(const Request& request);

// The set of a request. Throws Error(kInvalidArgument) if this rank is no member or has joined.
const ProcessSet& working_set(const Request& request, ProcessSets& sets);

// The call of these tensors, one at least; `count` 0: of none, which the first one names. Throws Error(kInvalidArgument
// or kWrongType) naming the request and the remedy. Does not check buffers. `set`: working_set() of the first.
CheckedCall check_call(std::span<const farandole_request> raw, size_t count, const ProcessSet& set,
                       Rank own);

// Throws Error(kInvalidArgument) if a message has no buffer, or if input and output overlap, except in place as
// farandole.h allows. For outputs sized by negotiation, checks only the bytes known locally. `mine`: of this part.
void check_buffers(const Request& request, size_t part, const Submission& mine,
                   const ProcessSet& set);

// What is sent with the report: row counts and, if small, the input itself, as a pointer into the user's
// buffer.
Contribution contribution_of(const Signature& signature, const Submission& mine, Rank own);

// FARANDOLE_CHECK_NUMERICS: the first NaN or infinity in the input of a call; code kOk: none, or this rank has no input.
Failure numerics_of(const Request& request, size_t part, const Submission& mine, Rank own);

}  // namespace farandole
