// SPDX-License-Identifier: Apache-2.0
// Small files: reading those of /proc and /sys, writing reports. Any thread. Where other users may write too, as in
// /tmp, what they have put at a name is neither followed nor written into.
#pragma once

#include <string>
#include <string_view>

#include "lib/os/fd.h"

namespace farandole {

// The file as far as it can be read; empty: not at all.
std::string read_text_file(const std::string& path);

// Writes all of it; false: errno tells why not.
bool write_whole(int fd, std::string_view text);

// A new file to write, in place of one that is there; a device or pipe is opened as it is. Invalid: errno tells why.
Fd create_file(const std::string& path);

// Creates or replaces a file atomically; only this user may read it. Throws Error(kLibrary).
void write_text_file(const std::string& path, const std::string& text);

// Creates a folder and its parents if missing. Throws Error(kLibrary).
void make_folder(const std::string& path);

}  // namespace farandole
