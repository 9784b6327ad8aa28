// SPDX-License-Identifier: Apache-2.0
#include "lib/text_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "lib/fd.h"

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

}  // namespace farandole
