// SPDX-License-Identifier: Apache-2.0
// Small files of /proc and /sys.
#pragma once

#include <string>

namespace farandole {

// The whole file; empty if it cannot be read.
std::string read_text_file(const std::string& path);

}  // namespace farandole
