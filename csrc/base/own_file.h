// SPDX-License-Identifier: Apache-2.0
// Decides which files farandole trusts: those of this user and of root. May be called from any thread.
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

// Returns the status of a name in a folder. Does not follow a link. On failure, returns nullopt and sets errno.
std::optional<struct stat> look_at(int folder, const char* name);

// True if only this user or root can have put the file `found` into `folder`. If other users may write to the folder
// and it has no sticky bit, they can have created the file or renamed a link of this user.
bool is_own_choice(int folder, const struct stat& found);

constexpr int kOwnFolder = O_PATH | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW;
// Opens `path` one component at a time. `flags` (kOwnFolder, or flags for reading a file) apply to the last component.
// If `makes` is true, creates missing folders. On failure, returns -1 and sets errno. errno is EPERM if a link fails
// is_own_choice(), if a file to be read is not in a folder of this user or root, or if a link to that file is in a
// folder that fails is_own().
int open_own(const std::string& path, int flags, bool makes = false);

// Returns the text of a regular file of at most 64 MB that open_own() can open and that passes is_own(). Otherwise
// returns nullopt. `why` then tells what is wrong, but stays empty if opening failed with an error other than EPERM.
// Never waits for the writer of a pipe.
std::optional<std::string> read_own_file(const std::string& path, std::string& why);

}  // namespace farandole
