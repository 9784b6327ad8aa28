// SPDX-License-Identifier: Apache-2.0
// FARANDOLE_CHECK_NUMERICS: stops NaN and infinity on the rank and in the tensor where they come up.
#pragma once

#include <span>

#include "runtime/calls/pending.h"

struct farandole_request;

namespace farandole {

// What is wrong with the input of a call; code kOk: nothing, or this rank brings none.
Failure numerics_of(const Request& request, const Submission& submission, Rank own);
// Of the first of these that has something wrong; arguments that make no sense are left to take_in().
Failure numerics_of(std::span<const farandole_request> requests, Rank own);

}  // namespace farandole
