// SPDX-License-Identifier: Apache-2.0
// Tells which files farandole trusts: those of this user and of root. Any thread may call these functions.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>

#include <optional>
#include <string>

namespace farandole {

// See farandole_is_own_user().
bool is_own_user(uid_t user);

// True if only this user and root can have written the file or folder.
bool is_own(const struct stat& found);

// Returns the status of a name in a folder. Does not follow a link. On failure returns nullopt and sets errno.
std::optional<struct stat> look_at(int folder, const char* name);

// True if only this user or root can have put the file `found` into `folder`. Others can have made the file, or renamed
// a link of this user, if they may write to the folder and it has no sticky bit.
bool is_own_choice(int folder, const struct stat& found);

constexpr int kOwnFolder = O_PATH | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW;
// Opens `path` one component at a time. `flags` (kOwnFolder, or flags to read a file) apply to the last component. If
// `makes`, creates missing folders. On failure returns -1 and sets errno. EPERM: a link fails is_own_choice(), a file
// to read is not in a folder of this user or root, or a link to it is in a folder that fails is_own().
int open_own(const std::string& path, int flags, bool makes = false);

// Returns the text of a regular file of at most 64 MB that open_own() opens and that passes is_own(). Otherwise returns
// nullopt; `why` says what is wrong, but is empty if opening failed without EPERM. Never waits for a pipe's writer.
std::optional<std::string> read_own_file(const std::string& path, std::string& why);

}  // namespace farandole
