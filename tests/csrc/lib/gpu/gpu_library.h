// SPDX-License-Identifier: Apache-2.0
// The GPU double, opened as the real libraries are, and what tests steer it with.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>

#include "check.h"
#include "lib/gpu/cuda.h"
#include "lib/gpu/gpu_double/gpu_double.h"
#include "lib/gpu/nccl.h"
#include "lib/gpu/nvrtc.h"
#include "lib/os/dl.h"

namespace farandole::check {

struct GpuLibrary {
  std::string path =
      std::filesystem::read_symlink("/proc/self/exe").parent_path() / "libgpu_double.so";
  bool has_real_nccl = false;  // make test-nccl
  std::shared_ptr<const cuda::Api> cuda;
  std::shared_ptr<const nccl::Api> nccl;
  std::shared_ptr<const nvrtc::Api> nvrtc;
#define STEERED(name) \
  decltype(&gpu_double_##name) name = look_up<decltype(gpu_double_##name)>("gpu_double_" #name)
  STEERED(seed);
  STEERED(gate);
  STEERED(open);
  STEERED(call);
  STEERED(fail);
  STEERED(heal);
  STEERED(break_rank);
  STEERED(hold_launches);
  STEERED(hold_aborts);
  STEERED(capture);
  STEERED(end_capture);
  STEERED(algorithm);
  STEERED(ranges);
  STEERED(alive);
#undef STEERED

  template <class Function>
  Function* look_up(const char* name) const {
    return DynamicLibrary::try_open({path})->require<Function>(name);
  }
  // Ends the test over NCCL's real host code, whose calls nobody steers or counts. Call it in the test's own thread.
  void needs_nccl_double() const {
    if (has_real_nccl) skip("it steers or counts the calls of NCCL's double");
  }
};

inline const GpuLibrary& gpu_library() {
  static const auto* library = [] {
    auto* made = new GpuLibrary;
    made->cuda = cuda::open(made->path);
    const char* const real = std::getenv("FARANDOLE_TEST_NCCL");
    made->nccl = nccl::open({real ? real : made->path});
    made->nvrtc = nvrtc::open({made->path});
    made->has_real_nccl = real != nullptr;
    return made;
  }();
  return *library;
}

}  // namespace farandole::check
