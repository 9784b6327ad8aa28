// SPDX-License-Identifier: Apache-2.0
// Ranks of the NCCL double that are processes: with GPU_DOUBLE_FOLDER in the environment, each writes what it
// launches, inputs included, into a file there, and takes the others' files.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "gpu_double/nccl_launch.h"
#include "lib/nccl.h"

namespace farandole::check {

class NcclFiles {
 public:
  // Null where ranks are threads.
  static std::shared_ptr<NcclFiles> join(const nccl::UniqueId& id, int rank, int ranks);
  bool all_joined() const;
  // The own part of launch `number` is at the front of its stream; true once all are, their parts then being
  // in `launch`.
  bool meet(uint64_t number, Launch& launch);

 private:
  NcclFiles(std::string stem, int rank, int ranks);
  std::string path(const std::string& what, int rank) const;
  void write(const std::string& path, const std::string& content) const;

  std::string stem_;
  int rank_;
  int ranks_;
  uint64_t written_ = 0;  // launches
};

}  // namespace farandole::check
