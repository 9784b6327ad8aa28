// SPDX-License-Identifier: Apache-2.0
#include "lib/os/fd.h"

#include <unistd.h>

#include <cstddef>
#include <mutex>
#include <vector>

namespace farandole {
namespace {

// The table is never destroyed, because descriptors may be closed during process exit.
struct Owned {
  std::mutex mutex;
  std::vector<bool> by_number;  // true if an Fd of this process owns the descriptor
};

Owned& owned() {
  static auto* instance = new Owned;
  return *instance;
}

}  // namespace

Fd::Fd(int fd) : fd_(fd) {
  if (fd < 0) return;
  std::lock_guard lock(owned().mutex);
  const auto number = static_cast<size_t>(fd);
  if (owned().by_number.size() <= number) owned().by_number.resize(number + 1);
  owned().by_number[number] = true;
}

// In a forked child, an Fd of the parent closes nothing, because its number may meanwhile belong to a newer descriptor.
void Fd::reset() noexcept {
  if (fd_ < 0) return;
  std::lock_guard lock(owned().mutex);
  const auto number = static_cast<size_t>(std::exchange(fd_, -1));
  if (!owned().by_number[number]) return;
  ::close(static_cast<int>(number));
  owned().by_number[number] = false;
}

void Fd::before_fork() { owned().mutex.lock(); }
void Fd::after_fork_in_parent() { owned().mutex.unlock(); }

void Fd::after_fork_in_child() {
  for (size_t number = 0; number < owned().by_number.size(); ++number) {
    if (owned().by_number[number]) ::close(static_cast<int>(number));
    owned().by_number[number] = false;
  }
  owned().mutex.unlock();
}

}  // namespace farandole
