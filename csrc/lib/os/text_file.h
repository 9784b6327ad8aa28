// SPDX-License-Identifier: Apache-2.0
// Small files: reads those of /proc and /sys, writes reports. Any thread. In a folder where other users may write, as
// in /tmp, it never follows or overwrites what they have put there.
#pragma once

#include <string>
#include <string_view>

#include "lib/os/fd.h"

namespace farandole {

// Returns the readable part of the file; empty: none.
std::string read_text_file(const std::string& path);

// Writes all of it. False, with errno, after a failure.
bool write_whole(int fd, std::string_view text);

// Opens a new file in place of an existing one; devices and pipes as they are. Invalid Fd: see errno.
Fd create_file(const std::string& path);

// Creates or replaces a file atomically. Only this user may read it. Throws Error(kLibrary).
void write_text_file(const std::string& path, const std::string& text);

// Creates a folder and its parents if missing. Throws Error(kLibrary).
void make_folder(const std::string& path);

}  // namespace farandole
