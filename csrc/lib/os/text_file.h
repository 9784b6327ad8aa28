// SPDX-License-Identifier: Apache-2.0
// Small files: reading those of /proc and /sys, writing reports. Any thread.
#pragma once

#include <string>
#include <string_view>

namespace farandole {

// The file as far as it can be read; empty: not at all.
std::string read_text_file(const std::string& path);

// Writes all of it; false: errno tells why not.
bool write_whole(int fd, std::string_view text);

// Creates or replaces a file atomically. Throws Error(kLibrary).
void write_text_file(const std::string& path, const std::string& text);

// Creates a folder and its parents if missing. Throws Error(kLibrary).
void make_folder(const std::string& path);

}  // namespace farandole
