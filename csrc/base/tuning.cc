// SPDX-License-Identifier: Apache-2.0
#include "base/tuning.h"

#include <cstdlib>
#include <fstream>

#include "base/error.h"

namespace farandole {
namespace {

std::string trimmed(const std::string& text) {
  const char* blank = " \t\r";
  size_t first = text.find_first_not_of(blank);
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(blank) - first + 1);
}

std::string variable_or(const char* name, const std::string& fallback) {
  const char* value = std::getenv(name);
  return value && *value ? value : fallback;
}

// In $XDG_CONFIG_HOME or ~/.config; "" if neither is known.
std::string usual_path() {
  std::string home = variable_or("HOME", "");
  std::string folder = variable_or("XDG_CONFIG_HOME", home.empty() ? "" : home + "/.config");
  return folder.empty() ? "" : folder + "/farandole/tuning.conf";
}

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw Error(ErrorCode::kInvalidArgument,
              "tuning file " + path + ": " + why +
                  "; remedy: run `farandole tune` again, or set FARANDOLE_TUNING=none");
}

}  // namespace

TuningFile read_tuning_file(const std::string& path) {
  if (path == "none") return {};
  TuningFile file{.path = path.empty() ? usual_path() : path, .values = {}};
  std::ifstream lines(file.path);
  if (!lines) {
    if (!path.empty()) refuse(path, "cannot be read");
    return {};
  }
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    line = trimmed(line.substr(0, line.find('#')));
    if (line.empty()) continue;
    size_t equals = line.find('=');
    if (equals == std::string::npos) {
      refuse(file.path, "line " + std::to_string(number) + " is not NAME = VALUE");
    }
    file.values[trimmed(line.substr(0, equals))] = trimmed(line.substr(equals + 1));
  }
  return file;
}

}  // namespace farandole
