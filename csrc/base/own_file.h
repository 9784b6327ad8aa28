// SPDX-License-Identifier: Apache-2.0
// Which users, and which files of theirs, farandole trusts: this user's and root's. Any thread.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>

#include <optional>
#include <string>

namespace farandole {

// True for the user that this process runs as. False for the kernel's overflow user (65534, nobody) in a user namespace
// that does not map every user: there it stands for all users that are not mapped.
bool is_own_user(uid_t user);

// True if nobody but this user and root can have written the file or folder.
bool is_own(const struct stat& found);

// Looks at a name in a folder, and follows no link. nullopt: errno tells why.
std::optional<struct stat> look_at(int folder, const char* name);

// True if only this user or root can have chosen what is at the name `found` in `folder`. In a folder that others may
// write to, they could have put it there, or moved a link of the user's own to this name. The sticky bit, as /tmp has
// it, keeps them from moving what is not theirs.
bool is_own_choice(int folder, const struct stat& found);

constexpr int kOwnFolder = O_PATH | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW;
// Opens the end of `path` with these flags, piece by piece: kOwnFolder, or those to read a file. Makes the folders that
// are missing if `makes`. -1 with errno, EPERM for a link on the way that is not is_own_choice(). A file to be read must
// be in a folder of this user or root, and a link to it in one that is_own().
int open_own(const std::string& path, int flags, bool makes = false);

// The text of a regular file that is_own(), by open_own(). nullopt: there is none; then `why` says what is wrong with
// the file, or is empty if it cannot be opened. Never waits for a pipe's writer, and reads at most 64 MB.
std::optional<std::string> read_own_file(const std::string& path, std::string& why);

}  // namespace farandole
