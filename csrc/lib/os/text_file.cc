// SPDX-License-Identifier: Apache-2.0
#include "lib/os/text_file.h"

#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "base/error.h"
#include "base/own_file.h"

namespace farandole {
namespace {

constexpr int kFresh = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
constexpr mode_t kMode = 0600;

// True if only this user or root can have chosen what is at the name `found` in `folder`. In a folder that others may
// write to, they could have put it there, or moved a link of the user's own to this name. The sticky bit, as /tmp has
// it, keeps them from moving what is not theirs.
bool trusted(int folder, const struct stat& found) {
  struct stat where{};
  if (fstat(folder, &where) != 0) return false;
  if (is_own(where)) return true;
  const auto ours = [](uid_t user) { return user == 0 || is_own_user(user); };
  return (where.st_mode & S_ISVTX) != 0 && ours(where.st_uid) && ours(found.st_uid);
}

// The folder `name` in `folder`; with errno if there is none, or a link to it that may not be followed.
Fd enter(int folder, const char* name) {
  constexpr int kFolder = O_PATH | O_DIRECTORY | O_CLOEXEC;
  Fd inner(openat(folder, name, kFolder | O_NOFOLLOW));
  if (inner) return inner;
  const int reason = errno;
  const auto found = look_at(folder, name);
  if (!found || !S_ISLNK(found->st_mode)) {
    errno = reason;
    return {};
  }
  if (trusted(folder, *found)) return Fd(openat(folder, name, kFolder));
  errno = EACCES;
  return {};
}

// The folder at the end of `path`, piece by piece; what is missing is made if `makes`.
Fd walk(const std::string& path, bool makes) {
  Fd at(open(path.starts_with('/') ? "/" : ".", O_PATH | O_DIRECTORY | O_CLOEXEC));
  std::istringstream pieces(path);
  for (std::string piece; at && std::getline(pieces, piece, '/');) {
    if (piece.empty()) continue;
    if (makes && mkdirat(at.get(), piece.c_str(), 0755) != 0 && errno != EEXIST) return {};
    at = enter(at.get(), piece.c_str());
  }
  return at;
}

// A file's folder and its name in it.
struct Place {
  explicit Place(const std::string& path)
      : folder(walk(path.substr(0, path.find_last_of('/') + 1), false)),
        name(path.substr(path.find_last_of('/') + 1)) {}
  Fd folder;
  std::string name;
};

// Nobody can have put something at such a name before.
std::string unforeseen(const std::string& name) {
  uint64_t random = 0;
  if (getrandom(&random, sizeof random, 0) != sizeof random)
    random = static_cast<uint64_t>(getpid());
  return name + "." + std::to_string(random) + ".tmp";
}

}  // namespace

std::optional<struct stat> look_at(int folder, const char* name) {
  const Fd fd(openat(folder, name, O_PATH | O_NOFOLLOW | O_CLOEXEC));
  struct stat found{};
  if (!fd || fstat(fd.get(), &found) != 0) return std::nullopt;
  return found;
}

std::string read_text_file(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();  // what an error in the middle leaves; it does not throw
  return text.str();
}

bool write_whole(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t wrote = write(fd, text.data(), text.size());
    if (wrote < 0 && errno != EINTR) return false;
    if (wrote > 0) text.remove_prefix(static_cast<size_t>(wrote));
  }
  return true;
}

Fd create_file(const std::string& path) {
  const Place place(path);
  const char* const name = place.name.c_str();
  for (int attempt = 0; place.folder && attempt < 3; ++attempt) {
    Fd fresh(openat(place.folder.get(), name, kFresh, kMode));
    if (fresh || errno != EEXIST) return fresh;
    const auto found = look_at(place.folder.get(), name);
    if (!found) continue;
    if (S_ISREG(found->st_mode)) {  // not written into: it may be another name of a file elsewhere
      if (unlinkat(place.folder.get(), name, 0) != 0) return {};
      continue;
    }
    if (trusted(place.folder.get(), *found)) {
      return Fd(openat(place.folder.get(), name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, kMode));
    }
    errno = EACCES;
    return {};
  }
  return {};
}

void write_text_file(const std::string& path, const std::string& text) {
  const Place place(path);
  const int folder = place.folder.get();
  if (!place.folder) throw_system_error("cannot write " + path, errno);
  const std::string fresh = unforeseen(place.name);
  const auto give_up = [&](const std::string& what) {
    const int reason = errno;
    unlinkat(folder, fresh.c_str(), 0);
    throw_system_error(what, reason);
  };
  const Fd fd(openat(folder, fresh.c_str(), kFresh, kMode));
  if (!fd || !write_whole(fd.get(), text)) give_up("cannot write " + path);
  if (renameat(folder, fresh.c_str(), folder, place.name.c_str()) != 0) {
    give_up("cannot make " + path);
  }
}

void make_folder(const std::string& path) {
  if (!walk(path, true)) throw_system_error("cannot make the folder " + path, errno);
}

}  // namespace farandole
