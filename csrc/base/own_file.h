// SPDX-License-Identifier: Apache-2.0
// Which users and which of their files farandole trusts: this user's and root's. Any thread may call these functions.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>

#include <optional>
#include <string>

namespace farandole {

// True for the user that this process runs as. False for the kernel's overflow user (65534, nobody) in a user
// namespace that does not map every user: there it stands for all unmapped users.
bool is_own_user(uid_t user);

// True if nobody but this user and root can have written the file or folder.
bool is_own(const struct stat& found);

// Looks up a name in a folder without following a link. Returns nullopt with errno.
std::optional<struct stat> look_at(int folder, const char* name);

// True if only this user or root can have chosen what is at the name `found` in `folder`. In a folder without sticky
// bit that others may write to, they could have put it there, or moved a link of this user to it.
bool is_own_choice(int folder, const struct stat& found);

constexpr int kOwnFolder = O_PATH | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW;
// Opens the end of `path` with these flags, component by component: kOwnFolder, or flags to read a file. Creates
// missing folders if `makes`. Returns -1 with errno, EPERM for a link that fails is_own_choice(). A file to read must
// be in a folder of this user or root, and a link to it in one that is_own().
int open_own(const std::string& path, int flags, bool makes = false);

// Text of a regular file that is_own(), opened by open_own(). Returns nullopt if there is none; `why` then says what
// is wrong with the file, or is empty if it cannot be opened. Never waits for a pipe's writer; reads at most 64 MB.
std::optional<std::string> read_own_file(const std::string& path, std::string& why);

}  // namespace farandole
