// SPDX-License-Identifier: Apache-2.0
#include "base/own_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>
#include <vector>

namespace farandole {
namespace {

constexpr off_t kMostBytes = off_t{64} << 20;
constexpr mode_t kOthersWrite = S_IWGRP | S_IWOTH;
constexpr int kMostLinks = 40;  // in one path; the kernel has the same limit

uid_t overflow_user() {
  uid_t user = 65534;
  std::ifstream("/proc/sys/kernel/overflowuid") >> user;
  return user;
}

// True in the initial user namespace and in a namespace that maps all users of the initial namespace.
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

bool is_trusted_user(uid_t user) { return user == 0 || is_own_user(user); }

bool has_trusted_owner(int folder) {
  struct stat found{};
  return fstat(folder, &found) == 0 && is_trusted_user(found.st_uid);
}

// Pushes the components of a path onto the stack `left`, so that the first component is on top.
void put(std::vector<std::string>& left, const std::string& path) {
  std::vector<std::string> found;
  std::istringstream pieces(path);
  for (std::string piece; std::getline(pieces, piece, '/');)
    if (!piece.empty()) found.push_back(piece);
  left.insert(left.end(), found.rbegin(), found.rend());
}

// Returns the target of the link `name` in `folder`. If it is not a link or must not be followed, returns "" and sets
// errno.
std::string target_of(int folder, const char* name, bool reads) {
  const int reason = errno;  // tells why open_own() could not open the name itself
  struct stat where{};
  const auto found = look_at(folder, name);
  if (!found || !S_ISLNK(found->st_mode) || fstat(folder, &where) != 0) {
    errno = reason;
    return {};
  }
  errno = EPERM;
  if (reads ? !is_own(where) : !is_own_choice(folder, *found)) return {};
  errno = ELOOP;  // the caller returns this error if it has followed too many links
  char text[PATH_MAX];
  const ssize_t length = readlinkat(folder, name, text, sizeof text);
  return {text, static_cast<size_t>(std::max<ssize_t>(length, 0))};
}

}  // namespace

bool is_own_user(uid_t user) {
  return user == geteuid() && (user != overflow_user() || maps_every_user());
}

bool is_own(const struct stat& found) {
  return (is_own_user(found.st_uid) || found.st_uid == 0) && (found.st_mode & kOthersWrite) == 0;
}

std::optional<struct stat> look_at(int folder, const char* name) {
  const int fd = openat(folder, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
  struct stat found{};
  const bool looked = fd >= 0 && fstat(fd, &found) == 0;
  if (fd >= 0) close(fd);
  return looked ? std::optional(found) : std::nullopt;
}

bool is_own_choice(int folder, const struct stat& found) {
  struct stat where{};
  if (fstat(folder, &where) != 0) return false;
  if (is_own(where)) return true;
  return (where.st_mode & S_ISVTX) != 0 && is_trusted_user(where.st_uid) &&
         is_trusted_user(found.st_uid);
}

int open_own(const std::string& path, int flags, bool makes) {
  const bool reads = (flags & O_PATH) == 0;
  std::vector<std::string> left;
  put(left, path);
  int at = open(path.starts_with('/') ? "/" : ".", kOwnFolder);
  for (int links = 0; at >= 0 && !left.empty();) {
    const std::string name = left.back();
    left.pop_back();
    const bool last = left.empty();
    int next = -1;
    if (!makes || mkdirat(at, name.c_str(), 0755) == 0 || errno == EEXIST) {
      next = openat(at, name.c_str(), last ? flags | O_NOFOLLOW : kOwnFolder);
      const std::string target = next < 0 ? target_of(at, name.c_str(), last && reads) : "";
      if (!target.empty() && ++links <= kMostLinks) {
        put(left, target);
        next = target.starts_with('/') ? open("/", kOwnFolder) : dup(at);
      } else if (next >= 0 && last && reads && !has_trusted_owner(at)) {
        close(std::exchange(next, -1));
        errno = EPERM;
      }
    }
    const int reason = errno;
    close(at);
    errno = reason;
    at = next;
  }
  return at;
}

std::optional<std::string> read_own_file(const std::string& path, std::string& why) {
  why.clear();
  if (path.empty()) return std::nullopt;
  const int fd = open_own(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  if (fd < 0) {
    if (errno == EPERM)
      why = "is a link that another user may have made, or lies in another user's folder";
    return std::nullopt;
  }
  struct stat found{};
  why = fstat(fd, &found) != 0 ? strerror(errno) : why_not(found);
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
