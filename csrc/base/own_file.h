// SPDX-License-Identifier: Apache-2.0
// Which users, and which files of theirs, farandole trusts: this user's and root's. Any thread.
#pragma once

#include <sys/stat.h>

#include <optional>
#include <string>

namespace farandole {

// True for the user that this process runs as. False for the kernel's overflow user (65534, nobody) in a user namespace
// that does not map every user: there it stands for all users that are not mapped.
bool is_own_user(uid_t user);

// True if nobody but this user and root can have written the file or folder.
bool is_own(const struct stat& found);

// The text of a regular file that is_own(). nullopt: there is none; then `why` says what is wrong with the file, or is
// empty if it cannot be opened. Never waits for a pipe's writer, and reads at most 64 MB.
std::optional<std::string> read_own_file(const std::string& path, std::string& why);

}  // namespace farandole
