// SPDX-License-Identifier: Apache-2.0
#include "lib/os/text_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "base/error.h"
#include "lib/os/fd.h"

namespace farandole {

std::string read_text_file(const std::string& path) {
  const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return {};
  std::string text;
  char block[1024];
  for (;;) {
    const ssize_t got = read(fd.get(), block, sizeof(block));
    if (got > 0) text.append(block, static_cast<size_t>(got));
    if (got == 0) return text;
    if (got < 0 && errno != EINTR) return {};
  }
}

void write_text_file(const std::string& path, const std::string& text) {
  const std::string fresh = path + "." + std::to_string(::getpid()) + ".tmp";
  const Fd fd(open(fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!fd) throw_system_error("cannot write " + fresh, errno);
  for (size_t done = 0; done < text.size();) {
    const ssize_t wrote = write(fd.get(), text.data() + done, text.size() - done);
    if (wrote > 0) done += static_cast<size_t>(wrote);
    if (wrote < 0 && errno != EINTR) throw_system_error("cannot write " + fresh, errno);
  }
  if (std::rename(fresh.c_str(), path.c_str()) != 0)
    throw_system_error("cannot make " + path, errno);
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
