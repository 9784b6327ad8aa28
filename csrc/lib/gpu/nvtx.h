// SPDX-License-Identifier: Apache-2.0
// Marks named ranges of time on the timeline of Nsight Systems, through NVIDIA's NVTX library. The ranges have no
// effect unless a profiler is running.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace farandole::nvtx {

struct Api {
  std::string path;

  int (*push)(const char* name);  // starts a range in the calling thread
  int (*pop)();                   // ends the innermost range
};

// Loads the library. On failure, throws Error(kLibrary) with a remedy.
std::shared_ptr<const Api> open(const std::vector<std::string>& paths);

// A range that covers the work launched while this object exists.
class Range {
 public:
  // If `api` is null, there is no range.
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
