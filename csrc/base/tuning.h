// SPDX-License-Identifier: Apache-2.0
// Reads the settings file that `farandole tune` writes: lines `NAME = VALUE`; `#` begins a comment.
#pragma once

#include <map>
#include <string>

namespace farandole {

struct TuningFile {
  std::string path;  // empty: there is none
  std::map<std::string, std::string> values;
};

// `path`: "none" for no file; or "" for farandole/tuning.conf in the user's configuration directory,
// if it exists. Throws Error(kInvalidArgument) if a requested file can't be read or a line is not NAME =
// VALUE.
TuningFile read_tuning_file(const std::string& path);

}  // namespace farandole
