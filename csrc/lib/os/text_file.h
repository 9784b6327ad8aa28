// SPDX-License-Identifier: Apache-2.0
// Small files: of /proc and /sys to read, reports to write.
#pragma once

#include <string>

namespace farandole {

// The whole file; empty if it cannot be read.
std::string read_text_file(const std::string& path);

// Makes or replaces a file, never half of it. Throws Error(kLibrary).
void write_text_file(const std::string& path, const std::string& text);

// A folder and those above it, unless they are there. Throws Error(kLibrary).
void make_folder(const std::string& path);

}  // namespace farandole
