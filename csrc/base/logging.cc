// SPDX-License-Identifier: Apache-2.0
#include "base/logging.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <string_view>
#include <utility>

#include "base/clock.h"
#include "base/json.h"

namespace farandole {
namespace {

constexpr std::array<std::string_view, 6> kNames = {"trace",   "debug", "info",
                                                    "warning", "error", "fatal"};

// A token bucket: each log line costs a token. It holds one second's tokens, so a burst of that many lines passes.
class Budget {
 public:
  bool take(int64_t per_second) {
    const double t = 1e-9 * static_cast<double>(now_ns());
    const auto most = static_cast<double>(per_second);
    tokens_ = std::min(most, tokens_ + (t - filled_) * most);
    filled_ = t;
    if (tokens_ < 1) return false;
    tokens_ -= 1;
    return true;
  }

 private:
  double tokens_ = 0;
  double filled_ = 0;
};

struct State {
  std::mutex mutex;
  LogSettings settings;
  Budget budget;
  uint64_t left_out = 0;
};

// The state is never destroyed, because threads may log during process exit.
State& state() {
  static auto* instance = new State;
  return *instance;
}

std::atomic<int> g_level{static_cast<int>(LogLevel::kWarning)};  // read without the lock

}  // namespace

std::string printable(std::string_view text) {
  std::string shown;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = static_cast<unsigned char>(i + 1 < text.size() ? text[i + 1] : '\0');
    const bool c1 = byte == 0xc2 && next >= 0x80 && next < 0xa0;  // U+0080 to U+009F in UTF-8
    if (c1 || (byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7f) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\x%02x", c1 ? next : byte);
      shown += escape;
      i += c1 ? 1 : 0;
    } else {
      shown += text[i];
    }
  }
  return shown;
}

const char* name_of(LogLevel level) { return kNames[static_cast<size_t>(level)].data(); }

LogLevel log_level_of(const std::string& name) {
  return static_cast<LogLevel>(std::ranges::find(kNames, name) - kNames.begin());
}

std::string plain_line(const LogLine& line) {
  std::string text;
  if (line.rank >= 0) text = "[rank " + std::to_string(line.rank) + " on " + line.host + "] ";
  text += std::string("farandole ") + name_of(line.level) + ": " + printable(line.text);
  if (line.left_out > 0) text += " (" + std::to_string(line.left_out) + " lines left out before)";
  return text + "\n";
}

std::string json_line(const LogLine& line) {
  Json json;
  json.open('{').member("time_ns", epoch_ns()).member("level", name_of(line.level));
  json.member("rank", line.rank).member("host", line.host).member("pid", ::getpid());
  json.member("text", line.text);
  if (line.left_out > 0) json.member("left_out", line.left_out);
  return json.close('}').text() + "\n";
}

LogFormat log_format_of(const std::string& name) { return name == "json" ? json_line : plain_line; }

void set_log(LogSettings settings) {
  std::lock_guard lock(state().mutex);
  g_level = static_cast<int>(settings.level);
  state().settings = std::move(settings);
}

void log(LogLevel level, const std::string& text) {
  if (static_cast<int>(level) < g_level) return;
  std::string line;
  {
    State& s = state();
    std::lock_guard lock(s.mutex);
    const bool limited = s.settings.per_second > 0 && level < LogLevel::kError;
    if (limited && !s.budget.take(s.settings.per_second)) {
      ++s.left_out;
      return;
    }
    const uint64_t left_out = std::exchange(s.left_out, 0);
    line = s.settings.format({level, s.settings.rank, s.settings.host, text, left_out});
  }
  // Ignores errors, because stderr may be full or closed.
  [[maybe_unused]] ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace farandole
