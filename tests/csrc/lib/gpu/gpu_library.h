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
  std::string path;
  bool has_real_nccl = false;  // make test-nccl
  std::shared_ptr<const cuda::Api> cuda;
  std::shared_ptr<const nccl::Api> nccl;
  std::shared_ptr<const nvrtc::Api> nvrtc;
  decltype(&gpu_double_seed) seed;
  decltype(&gpu_double_gate) gate;
  decltype(&gpu_double_open) open;
  decltype(&gpu_double_call) call;
  decltype(&gpu_double_fail) fail;
  decltype(&gpu_double_heal) heal;
  decltype(&gpu_double_break_rank) break_rank;
  decltype(&gpu_double_hold_launches) hold_launches;
  decltype(&gpu_double_hold_aborts) hold_aborts;
  decltype(&gpu_double_capture) capture;
  decltype(&gpu_double_end_capture) end_capture;
  decltype(&gpu_double_algorithm) algorithm;
  decltype(&gpu_double_ranges) ranges;
  decltype(&gpu_double_alive) alive;

  // Ends the test over NCCL's real host code, whose calls nobody steers or counts. Call it in the test's own thread.
  void needs_nccl_double() const {
    if (has_real_nccl) skip("it steers or counts the calls of NCCL's double");
  }
};

inline const GpuLibrary& gpu_library() {
  static const auto* library = [] {
    auto* made = new GpuLibrary;
    made->path = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "libgpu_double.so";
    made->cuda = cuda::open(made->path);
    const char* const real = std::getenv("FARANDOLE_TEST_NCCL");
    made->nccl = nccl::open({real ? real : made->path});
    made->nvrtc = nvrtc::open({made->path});
    const DynamicLibrary steering = *DynamicLibrary::try_open({made->path});
    steering.fill(made->seed, "gpu_double_seed");
    steering.fill(made->gate, "gpu_double_gate");
    steering.fill(made->open, "gpu_double_open");
    steering.fill(made->call, "gpu_double_call");
    steering.fill(made->fail, "gpu_double_fail");
    steering.fill(made->heal, "gpu_double_heal");
    steering.fill(made->break_rank, "gpu_double_break_rank");
    steering.fill(made->hold_launches, "gpu_double_hold_launches");
    steering.fill(made->hold_aborts, "gpu_double_hold_aborts");
    steering.fill(made->capture, "gpu_double_capture");
    steering.fill(made->end_capture, "gpu_double_end_capture");
    steering.fill(made->algorithm, "gpu_double_algorithm");
    steering.fill(made->ranges, "gpu_double_ranges");
    steering.fill(made->alive, "gpu_double_alive");
    made->has_real_nccl = real != nullptr;
    return made;
  }();
  return *library;
}

}  // namespace farandole::check
