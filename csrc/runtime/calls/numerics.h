// SPDX-License-Identifier: Apache-2.0
// FARANDOLE_CHECK_NUMERICS: rejects NaN and infinity on the rank and in the tensor where they first appear.
#pragma once

#include <span>

#include "runtime/calls/pending.h"

struct farandole_request;

namespace farandole {

// What is wrong with the input of a call; code kOk: nothing, or this rank has no input.
Failure numerics_of(const Request& request, const Submission& submission, Rank own);
// The first such failure of these requests. Ignores invalid arguments: check_request() reports those.
Failure numerics_of(std::span<const farandole_request> requests, Rank own);

}  // namespace farandole
