// SPDX-License-Identifier: Apache-2.0
#include "lib/os/text_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "base/error.h"
#include "lib/os/fd.h"

namespace farandole {

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

void write_text_file(const std::string& path, const std::string& text) {
  const std::string fresh = path + "." + std::to_string(::getpid()) + ".tmp";
  const auto give_up = [&fresh](const std::string& what) {
    const int reason = errno;
    ::unlink(fresh.c_str());
    throw_system_error(what, reason);
  };
  const Fd fd(open(fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!fd || !write_whole(fd.get(), text)) give_up("cannot write " + fresh);
  if (std::rename(fresh.c_str(), path.c_str()) != 0) give_up("cannot make " + path);
}

void make_folder(const std::string& path) {
  for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const std::string folder = path.substr(0, end);
    if (::mkdir(folder.c_str(), 0755) != 0 && errno != EEXIST) {
      throw_system_error("cannot make the folder " + folder, errno);
    }
    if (end == std::string::npos) return;
  }
}

}  // namespace farandole
