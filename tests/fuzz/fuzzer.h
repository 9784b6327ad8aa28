// SPDX-License-Identifier: Apache-2.0
// A small coverage-guided fuzzer for gcc: an input that takes a new edge of the instrumented code joins the
// corpus from which the next ones are made (the idea of AFL, Zalewski 2013).
#pragma once

#include <cstdint>
#include <vector>

namespace farandole::fuzz {

using Input = std::vector<uint8_t>;

// Where it begins; the target's.
std::vector<Input> seeds();

}  // namespace farandole::fuzz
