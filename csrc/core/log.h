// SPDX-License-Identifier: Apache-2.0
// One line per event on stderr, rank first.
#pragma once

#include <string>

namespace farandole {

enum class LogLevel { kTrace, kDebug, kInfo, kWarning, kError, kFatal };

// Throws Error(kInvalidArgument) for an unknown name.
LogLevel log_level_of(const std::string& name);

// Called at init; before, the level is warning and the rank unknown.
void set_log(LogLevel level, int rank);

// Any thread. One write(2) per line, so that lines of several ranks do not mix.
void log(LogLevel level, const std::string& text);

}  // namespace farandole
