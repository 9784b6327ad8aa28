// SPDX-License-Identifier: Apache-2.0
// The file of settings that `farandole tune` writes: lines `NAME = VALUE`; `#` begins a comment.
#pragma once

#include <map>
#include <string>

namespace farandole {

struct TuningFile {
  std::string path;  // empty: there is none
  std::map<std::string, std::string> values;
};

// `asked`: the file's path, "none" for no file, or "" for farandole/tuning.conf in the user's
// configuration directory, where it exists. Throws Error(kInvalidArgument) on a file that was asked
// for and cannot be read, and on a line that is no setting.
TuningFile read_tuning_file(const std::string& asked);

}  // namespace farandole
