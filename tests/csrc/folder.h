// SPDX-License-Identifier: Apache-2.0
// A folder of a test's own, gone with the object.
#pragma once

#include <stdlib.h>
#include <sys/stat.h>

#include <filesystem>
#include <string>

#include "check.h"

namespace farandole::check {

class Folder {
 public:
  explicit Folder(mode_t mode = 0700) { CHECK_EQ(chmod(root_.c_str(), mode), 0); }
  ~Folder() { std::filesystem::remove_all(root_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string path(const std::string& name = {}) const { return root_ + "/" + name; }

 private:
  char pattern_[32] = "/tmp/farandole-test-XXXXXX";
  const std::string root_ = mkdtemp(pattern_);
};

}  // namespace farandole::check
