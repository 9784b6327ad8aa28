// SPDX-License-Identifier: Apache-2.0
// Named ranges on Nsight Systems' timeline, by NVIDIA's NVTX library. They do nothing without a profiler.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace farandole::nvtx {

struct Api {
  std::string path;

  int (*push)(const char* name);  // for the calling thread
  int (*pop)();
};

// Throws Error(kLibrary) with a remedy.
std::shared_ptr<const Api> open(const std::vector<std::string>& paths);

// A range from here to the end of the scope. What is launched meanwhile belongs to it.
class Range {
 public:
  // `api`: nullptr: does nothing.
  Range(const Api* api, const std::string& name) : api_(api) {
    if (api_) api_->push(name.c_str());
  }
  ~Range() {
    if (api_) api_->pop();
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  const Api* api_;
};

}  // namespace farandole::nvtx
