// SPDX-License-Identifier: Apache-2.0
// Marks named ranges of time on Nsight Systems' timeline, through NVIDIA's NVTX library. Without a profiler, ranges
// have no effect.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace farandole::nvtx {

struct Api {
  std::string path;

  int (*push)(const char* name);  // starts a range of the calling thread
  int (*pop)();                   // ends the range
};

// Loads the library. Throws Error(kLibrary) with a remedy.
std::shared_ptr<const Api> open(const std::vector<std::string>& paths);

// A range for the work that is launched while this object exists.
class Range {
 public:
  // `api`: may be null; then there is no range.
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
