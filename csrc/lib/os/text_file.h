// SPDX-License-Identifier: Apache-2.0
// Reads files of /proc and /sys and writes reports. Any thread may call these functions. They neither follow nor
// overwrite other users' files and links, even in folders where all users may write, such as /tmp.
#pragma once

#include <string>
#include <string_view>

#include "lib/os/fd.h"

namespace farandole {

// Returns the file's text, up to a read error; empty if the file cannot be opened.
std::string read_text_file(const std::string& path);

// Writes the whole text. False: failed; see errno.
bool write_whole(int fd, std::string_view text);

// Creates a file, replacing an existing file, or opens an existing device or pipe. Invalid Fd: see errno.
Fd create_file(const std::string& path);

// Creates or replaces a file atomically. Only this user may read it. Throws Error(kLibrary).
void write_text_file(const std::string& path, const std::string& text);

// Creates a folder and its parents if missing. Throws Error(kLibrary).
void make_folder(const std::string& path);

}  // namespace farandole
