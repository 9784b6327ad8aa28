// SPDX-License-Identifier: Apache-2.0
#include "lib/os/text_file.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "base/clock.h"
#include "base/error.h"
#include "base/own_file.h"

namespace farandole {
namespace {

constexpr int kFresh = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
constexpr mode_t kMode = 0600;

struct PathParts {
  explicit PathParts(const std::string& path)
      : folder(open_own(path.substr(0, path.find_last_of('/') + 1), kOwnFolder)),
        name(path.substr(path.find_last_of('/') + 1)) {}
  Fd folder;
  std::string name;
};

// Returns an unpredictable name, so that no other user can have created the file in advance.
std::string unforeseen(const std::string& name) {
  uint64_t random = 0;
  if (getrandom(&random, sizeof random, 0) != sizeof random)
    random = static_cast<uint64_t>(getpid());
  return name + "." + std::to_string(random) + ".tmp";
}

timespec timespec_of(int64_t ns) { return {ns / 1'000'000'000, ns % 1'000'000'000}; }

// Ignores a time in the future, since somebody has set the clock back, and files of other users.
bool is_made_later(const std::optional<struct stat>& file, int64_t made_ns) {
  if (!file || file->st_uid != geteuid()) return false;
  const int64_t its_ns = int64_t{file->st_mtim.tv_sec} * 1'000'000'000 + file->st_mtim.tv_nsec;
  return its_ns > made_ns && its_ns <= epoch_ns();
}

}  // namespace

std::string read_text_file(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();  // does not throw: a read error ends the text
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
  const PathParts parts(path);
  const char* const name = parts.name.c_str();
  for (int attempt = 0; parts.folder && attempt < 3; ++attempt) {
    Fd fresh(openat(parts.folder.get(), name, kFresh, kMode));
    if (fresh || errno != EEXIST) return fresh;
    const auto found = look_at(parts.folder.get(), name);
    if (!found) continue;
    if (S_ISREG(found->st_mode)) {  // removed first, because it may be a hard link to another file
      if (unlinkat(parts.folder.get(), name, 0) != 0) return {};
      continue;
    }
    if (is_own_choice(parts.folder.get(), *found)) {
      return Fd(openat(parts.folder.get(), name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, kMode));
    }
    errno = EACCES;
    return {};
  }
  return {};
}

void write_text_file(const std::string& path, const std::string& text,
                     std::optional<int64_t> made_ns) {
  const PathParts parts(path);
  const int folder = parts.folder.get();
  if (!parts.folder) throw_system_error("cannot write " + path, errno);
  const std::string fresh = unforeseen(parts.name);
  const auto give_up = [&](const std::string& what) {
    const int reason = errno;
    unlinkat(folder, fresh.c_str(), 0);
    throw_system_error(what, reason);
  };
  const Fd fd(openat(folder, fresh.c_str(), kFresh, kMode));
  if (!fd || !write_whole(fd.get(), text)) give_up("cannot write " + path);
  const timespec time = timespec_of(made_ns.value_or(0)), times[2] = {time, time};
  // Some file systems keep no times. Their files are replaced.
  if (made_ns && futimens(fd.get(), times) == 0 &&
      is_made_later(look_at(folder, parts.name.c_str()), *made_ns)) {
    unlinkat(folder, fresh.c_str(), 0);
    return;
  }
  if (renameat(folder, fresh.c_str(), folder, parts.name.c_str()) != 0) {
    give_up("cannot make " + path);
  }
}

void make_folder(const std::string& path) {
  if (!Fd(open_own(path, kOwnFolder, true)))
    throw_system_error("cannot make the folder " + path, errno);
}

}  // namespace farandole
