// SPDX-License-Identifier: Apache-2.0
#include "base/own_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

namespace farandole {
namespace {

constexpr off_t kMostBytes = off_t{64} << 20;
constexpr mode_t kOthersWrite = S_IWGRP | S_IWOTH;

uid_t overflow_user() {
  uid_t user = 65534;
  std::ifstream("/proc/sys/kernel/overflowuid") >> user;
  return user;
}

// True in the initial user namespace, and in one that maps all of it.
bool maps_every_user() {
  constexpr uint64_t kUsers = 0xffffffff;
  uint64_t inside = 0;
  uint64_t outside = 0;
  uint64_t count = 0;
  std::ifstream("/proc/self/uid_map") >> inside >> outside >> count;
  return count >= kUsers;
}

std::string why_not(const struct stat& found) {
  if (!S_ISREG(found.st_mode)) return "is not a regular file";
  if (!is_own_user(found.st_uid) && found.st_uid != 0) {
    return "belongs to user " + std::to_string(found.st_uid);
  }
  if (!is_own(found)) return "can be written by other users: chmod go-w";
  return found.st_size > kMostBytes ? "is larger than 64 MB" : "";
}

// False if another user can have chosen which of this user's files is at `path`: by a link, or in a folder of theirs.
bool is_own_place(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  struct stat folder{};
  struct stat found{};
  if (stat(slash == std::string::npos ? "." : path.substr(0, slash + 1).c_str(), &folder) != 0 ||
      lstat(path.c_str(), &found) != 0) {
    return false;
  }
  if (is_own(folder)) return true;
  return (folder.st_uid == 0 || is_own_user(folder.st_uid)) && !S_ISLNK(found.st_mode);
}

}  // namespace

bool is_own_user(uid_t user) {
  return user == geteuid() && (user != overflow_user() || maps_every_user());
}

bool is_own(const struct stat& found) {
  return (is_own_user(found.st_uid) || found.st_uid == 0) && (found.st_mode & kOthersWrite) == 0;
}

std::optional<std::string> read_own_file(const std::string& path, std::string& why) {
  why.clear();
  const int fd = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  struct stat found{};
  why = fstat(fd, &found) != 0 ? strerror(errno) : why_not(found);
  if (why.empty() && !is_own_place(path))
    why = "is a link that another user can have made, or lies in another user's folder";
  std::string text(why.empty() ? static_cast<size_t>(found.st_size) : 0, '\0');
  size_t filled = 0;
  while (filled < text.size()) {
    const ssize_t got = read(fd, text.data() + filled, text.size() - filled);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) why = std::string("cannot be read: ") + strerror(errno);
    if (got <= 0) break;
    filled += static_cast<size_t>(got);
  }
  close(fd);
  if (!why.empty()) return std::nullopt;
  text.resize(filled);
  return text;
}

}  // namespace farandole
