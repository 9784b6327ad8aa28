// SPDX-License-Identifier: Apache-2.0
// The log as one JSON object a line, for machines that collect it.
#pragma once

#include "base/log.h"

namespace farandole {

// {"time_ns": since 1970, "level", "rank", "host", "pid", "text", "left_out" (if any)}
std::string json_line(const LogLine& line);

// Both formats by name; throws Error(kInvalidArgument) for another.
std::string (*log_format_of(const std::string& name))(const LogLine&);

}  // namespace farandole
