// SPDX-License-Identifier: Apache-2.0
// Writes log lines to stderr, each with the rank, the host, the level and a text. A rate limit drops excess lines.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <utility>

namespace farandole {

enum class LogLevel { kTrace, kDebug, kInfo, kWarning, kError, kFatal };

LogLevel log_level_of(const std::string& name);
const char* name_of(LogLevel level);

// Makes a text of another process safe to show in a terminal: escapes all control characters except line ends and tabs.
std::string printable(std::string_view text);

struct LogLine {
  LogLevel level;
  int rank;  // -1 if it is not known yet
  const std::string& host;
  const std::string& text;
  uint64_t left_out;  // lines dropped by the rate limit before this one
};

using LogFormat = std::string (*)(const LogLine&);
// "[rank 1 on node7] farandole warning: ...\n"
std::string plain_line(const LogLine& line);
// A JSON object for log collectors, with the members "time_ns" (since 1970), "level", "rank", "host", "pid", "text"
// and, if lines were dropped, "left_out".
std::string json_line(const LogLine& line);
LogFormat log_format_of(const std::string& name);

struct LogSettings {
  LogLevel level = LogLevel::kWarning;
  int rank = -1;
  std::string host;
  LogFormat format = plain_line;
  int64_t per_second = 0;  // limit for lines below kError; 0 means unlimited
};

// Called by init(). Until then, the defaults apply.
void set_log(LogSettings settings);

// May be called from any thread. Writes each line with a single write(2), so that lines of different ranks never mix.
void log(LogLevel level, const std::string& text);

// Runs one step of a shutdown. If the step throws, logs the error so that the shutdown can continue.
template <class Step>
void attempt(const std::string& what, Step&& step) {
  try {
    std::forward<Step>(step)();
  } catch (const std::exception& error) {
    log(LogLevel::kError, what + ": " + error.what());
  }
}

}  // namespace farandole
