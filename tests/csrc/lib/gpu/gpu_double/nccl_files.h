// SPDX-License-Identifier: Apache-2.0
// Ranks of the NCCL double that are processes: with GPU_DOUBLE_FOLDER in the environment, each writes what it
// launches, inputs included, into a file there, and takes the others' files.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "lib/gpu/gpu_double/nccl_launch.h"
#include "lib/gpu/nccl.h"

namespace farandole::check {

class NcclFiles {
 public:
  // Null where ranks are threads.
  static std::shared_ptr<NcclFiles> join(const nccl::UniqueId& id, int rank, int ranks);
  bool all_joined() const;
  // The own part of launch `number` is at the front of its stream; true once all are, their parts then being
  // in `launch`.
  bool meet(uint64_t number, Launch& launch);

  // One transfer, from one rank to another: the sender leaves its bytes, the receiver takes them away. True once
  // both have come.
  bool send(int to, uint64_t number, Transfer& transfer) const;
  bool receive(int from, uint64_t number, Transfer& transfer) const;

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
