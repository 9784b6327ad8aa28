// SPDX-License-Identifier: Apache-2.0
// One line per event on stderr: rank and host first, then the level. A flood is cut.
#pragma once

#include <cstdint>
#include <string>

namespace farandole {

enum class LogLevel { kTrace, kDebug, kInfo, kWarning, kError, kFatal };

// Throws Error(kInvalidArgument) for an unknown name.
LogLevel log_level_of(const std::string& name);
const char* name_of(LogLevel level);

struct LogLine {
  LogLevel level;
  int rank;  // -1: not known yet
  const std::string& host;
  const std::string& text;
  uint64_t left_out;  // lines that a flood has cost before this one
};

// "[rank 1 on node7] farandole warning: ...\n"
std::string plain_line(const LogLine& line);

struct LogSettings {
  LogLevel level = LogLevel::kWarning;
  int rank = -1;
  std::string host;
  std::string (*format)(const LogLine&) = plain_line;
  int64_t per_second = 0;  // lines below kError; 0: no limit
};

// Called at init; before, the defaults hold.
void set_log(LogSettings settings);

// Any thread. One write(2) per line, so that lines of several ranks do not mix.
void log(LogLevel level, const std::string& text);

}  // namespace farandole
