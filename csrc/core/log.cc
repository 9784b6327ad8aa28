// SPDX-License-Identifier: Apache-2.0
#include "core/log.h"

#include <unistd.h>

#include <array>
#include <atomic>

#include "core/error.h"

namespace farandole {
namespace {

constexpr std::array kNames = {"trace", "debug", "info", "warning", "error", "fatal"};
std::atomic<int> g_level{static_cast<int>(LogLevel::kWarning)};
std::atomic<int> g_rank{-1};

}  // namespace

LogLevel log_level_of(const std::string& name) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (name == kNames[i]) return static_cast<LogLevel>(i);
  }
  throw Error(
      ErrorCode::kInvalidArgument,
      "FARANDOLE_LOG_LEVEL='" + name + "' is none of trace, debug, info, warning, error, fatal");
}

void set_log(LogLevel level, int rank) {
  g_level = static_cast<int>(level);
  g_rank = rank;
}

void log(LogLevel level, const std::string& text) {
  if (static_cast<int>(level) < g_level) return;
  std::string line = "farandole";
  if (g_rank >= 0) line += " rank " + std::to_string(g_rank);
  line += std::string(" ") + kNames[static_cast<size_t>(level)] + ": " + text + "\n";
  // A full or closed stderr is not our failure.
  [[maybe_unused]] ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace farandole
