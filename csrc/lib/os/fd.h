// SPDX-License-Identifier: Apache-2.0
// An owned file descriptor.
#pragma once

#include <utility>

namespace farandole {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd);
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset() noexcept;

  // Call these around fork(). The child closes its copies of all descriptors that an Fd owns. Otherwise, as long as a
  // child lives, peers could not see that this process has ended.
  static void before_fork();
  static void after_fork_in_parent();
  static void after_fork_in_child();

 private:
  int fd_ = -1;
};

}  // namespace farandole
