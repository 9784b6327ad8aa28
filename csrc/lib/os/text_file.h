// SPDX-License-Identifier: Apache-2.0
// Reads files of /proc and /sys, and writes reports. These functions may be called from any thread. They never follow
// or overwrite other users' files and links, even in folders to which all users may write, such as /tmp.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "lib/os/fd.h"

namespace farandole {

// Returns the text of the file, up to a read error, or "" if the file cannot be opened.
std::string read_text_file(const std::string& path);

// Writes the whole text. On failure, returns false and sets errno.
bool write_whole(int fd, std::string_view text);

// Creates a file, replacing an existing one, or opens a device or pipe. If it fails, the Fd is invalid and errno is
// set.
Fd create_file(const std::string& path);

// Creates or replaces a file atomically. Only this user may read the file. If `made_ns` is given, it is the time when
// the text was made, by epoch_ns(): the file gets that time, and a file that was made later stays. Throws
// Error(kLibrary).
void write_text_file(const std::string& path, const std::string& text,
                     std::optional<int64_t> made_ns = std::nullopt);

// Creates a folder and its parents if they are missing. Throws Error(kLibrary).
void make_folder(const std::string& path);

}  // namespace farandole
