// SPDX-License-Identifier: Apache-2.0
#include "lib/ipc/socket_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <optional>
#include <vector>

#include "base/error.h"
#include "base/own_file.h"
#include "lib/os/fd.h"
#include "lib/os/process.h"

namespace farandole {
namespace {

constexpr mode_t kOwnOnly = 0700;
constexpr size_t kLongestName = 64;
constexpr time_t kNewSeconds = 2;  // sweep() keeps sockets that are younger than this

// Returns the candidate folders. All processes of a user on a host try them in this order. $XDG_RUNTIME_DIR is not the
// first, because it is removed at logout, after which a job may still run.
std::vector<std::string> candidates() {
  const std::string name = "/farandole-" + std::to_string(geteuid());
  std::vector<std::string> all{"/tmp" + name};
  const char* const runtime = std::getenv("XDG_RUNTIME_DIR");
  if (runtime != nullptr && *runtime == '/') all.push_back(std::string(runtime) + "/farandole");
  all.push_back("/dev/shm" + name);
  // Another user could create a folder with one of the other names, but not with this name.
  const char* const home = std::getenv("HOME");
  if (home != nullptr && *home == '/') all.push_back(std::string(home) + "/.farandole");
  return all;
}

// Creates the folder if it is missing. Returns the reason why it cannot be used, or "" if it can.
std::string trouble_with(const std::string& folder, std::optional<struct stat>& found) {
  if (folder.size() + 1 + kLongestName >= sizeof(sockaddr_un::sun_path)) return "is too long";
  if (folder.find_first_of(",: \t\n") != std::string::npos) return "has a comma, colon or blank";
  if (mkdir(folder.c_str(), kOwnOnly) != 0 && errno != EEXIST) return std::strerror(errno);
  found = look_at(AT_FDCWD, folder.c_str());
  if (!found) return std::strerror(errno);
  if (!is_own_user(found->st_uid)) return "belongs to user " + std::to_string(found->st_uid);
  if (!S_ISDIR(found->st_mode)) return "is not a folder";
  if ((found->st_mode & ACCESSPERMS) != kOwnOnly) return "must have mode 700";
  return {};
}

// True if a process has this socket open. A datagram socket cannot connect to one of farandole's sockets, but the error
// of connect() shows if a process has that socket open.
bool has_process(const std::string& path) {
  const Fd fd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  return !fd || connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 ||
         errno != ECONNREFUSED;
}

// Removes killed processes' sockets. Keeps new sockets, which right after bind() look like those of killed processes.
void sweep(const std::string& folder, const std::string& beginning) {
  const std::unique_ptr<DIR, int (*)(DIR*)> all(opendir(folder.c_str()), &closedir);
  if (!all) return;
  while (const dirent* entry = readdir(all.get())) {
    const std::string path = folder + "/" + entry->d_name;
    const auto found = path.starts_with(beginning) ? look_at(AT_FDCWD, path.c_str()) : std::nullopt;
    if (!found || !S_ISSOCK(found->st_mode)) continue;
    const bool old = std::time(nullptr) - found->st_mtime >= kNewSeconds;
    if (old && !has_process(path)) unlink(path.c_str());
  }
}

}  // namespace

SocketFolder socket_folder() {
  // The names contain the boot id, so that hosts that share the folder see only the sockets of their own processes.
  const std::string boot = boot_id();
  std::string why;
  for (const std::string& folder : candidates()) {
    std::optional<struct stat> found;
    const std::string trouble = trouble_with(folder, found);
    if (trouble.empty()) {
      const std::string prefix = folder + "/" + boot.substr(0, 8) + "-";
      sweep(folder, prefix);
      return {prefix,
              boot + " " + std::to_string(found->st_dev) + " " + std::to_string(found->st_ino)};
    }
    why += (why.empty() ? "" : "; ") + folder + ": " + trouble;
  }
  throw Error(ErrorCode::kLibrary, "there is no folder for this user's Unix sockets: " + why +
                                       ". Remedy: set XDG_RUNTIME_DIR to a folder of yours that "
                                       "nobody else may write to");
}

}  // namespace farandole
