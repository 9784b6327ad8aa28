// SPDX-License-Identifier: Apache-2.0
// NCCL, found at run time: the copy that the process has already loaded, otherwise a copy from site-packages.
// tests/single/test_gpu_declarations.py compares these declarations with NVIDIA's header.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/reduce_op.h"
#include "lib/gpu/cuda.h"

struct ncclComm;

namespace farandole::nccl {

using Result = int;
using Comm = ncclComm*;
using DataType = int;
using RedOp = int;

constexpr Result kSuccess = 0;
constexpr Result kInProgress = 7;  // only for non-blocking communicators

// NCCL's codes for types and operators are in the tables of base/dtype.h and base/reduce_op.h.
constexpr DataType kInt8 = traits_of(DType::kInt8).nccl;
constexpr RedOp kSum = traits_of(ReduceOp::kSum).nccl;

struct UniqueId {
  char bytes[128];
};

// The first members of ncclConfig_t. NCCL learns from `size` and `version` which members are present.
struct ConfigV21400 {
  size_t size = sizeof(ConfigV21400);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 1;
};

constexpr int kFirstWithConfig = 21400;  // oldest version that farandole supports
// In older versions, ncclCommAbort inside a group frees the communicator before the end of the group (src/init.cc).
constexpr int kFirstAbortOfGroups = 22203;

struct Api {
  std::string path;
  int version = 0;  // for example, 22707 for 2.27.7

  Result (*get_version)(int* version);
  Result (*unique_id)(UniqueId* id);
  Result (*init_rank)(Comm* comm, int ranks, UniqueId id, int rank, ConfigV21400* config);
  Result (*destroy)(Comm comm);
  Result (*finalize)(Comm comm);
  Result (*abort)(Comm comm);
  Result (*async_error)(Comm comm, Result* error);
  const char* (*error_text)(Result result);
  const char* (*last_error)(Comm comm);
  Result (*all_reduce)(const void* input, void* output, size_t count, DataType type, RedOp op,
                       Comm comm, cuda::Stream stream);
  Result (*broadcast)(const void* input, void* output, size_t count, DataType type, int root,
                      Comm comm, cuda::Stream stream);
  Result (*reduce)(const void* input, void* output, size_t count, DataType type, RedOp op, int root,
                   Comm comm, cuda::Stream stream);
  Result (*all_gather)(const void* input, void* output, size_t count, DataType type, Comm comm,
                       cuda::Stream stream);
  Result (*reduce_scatter)(const void* input, void* output, size_t count, DataType type, RedOp op,
                           Comm comm, cuda::Stream stream);
  Result (*send)(const void* input, size_t count, DataType type, int peer, Comm comm,
                 cuda::Stream stream);
  Result (*receive)(void* output, size_t count, DataType type, int peer, Comm comm,
                    cuda::Stream stream);
  Result (*group_start)();
  Result (*group_end)();

  // Returns "text (NCCL's last error)". Adds a remedy if CUDA rejected the call during a graph capture, or if a setting
  // of the user caused the error.
  std::string text_of(Result result, Comm comm) const;
  // If the result is a failure, throws Error(kLibrary) with "what: " and text_of().
  void check(Result result, const char* what, Comm comm = nullptr) const;
};

// Opens the first library in `paths` that is already loaded, otherwise the first that can be loaded. Throws
// Error(kLibrary) with a remedy if there is none, or if its version is too old.
std::shared_ptr<const Api> open(const std::vector<std::string>& paths);

}  // namespace farandole::nccl
