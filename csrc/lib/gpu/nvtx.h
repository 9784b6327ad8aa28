// SPDX-License-Identifier: Apache-2.0
// Named ranges on the timeline of Nsight Systems, by NVIDIA's NVTX library. Without a profiler its functions do
// nothing.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace farandole::nvtx {

struct Api {
  std::string path;

  int (*push)(const char* name);  // of the calling thread
  int (*pop)();
};

// Throws Error(kLibrary) with the remedy.
std::shared_ptr<const Api> open(const std::vector<std::string>& paths);

// From here to the end of the scope; what is launched in between belongs to it.
class Range {
 public:
  // nullptr: none.
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
