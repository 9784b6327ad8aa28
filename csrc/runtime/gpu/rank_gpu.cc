// SPDX-License-Identifier: Apache-2.0
// See rank_gpu.h. Made by GpuAccess in the thread of the first GPU tensor; then the driver's, but for windows and
// Adasum.
#include "runtime/gpu/rank_gpu.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/logging.h"
#include "data/gpu/gpu_staged_backend.h"
#include "data/nccl/nccl_backend.h"

namespace farandole {
namespace {

std::vector<std::string> places(const std::string& chosen, const std::vector<std::string>& folders,
                                const std::vector<std::string>& names) {
  if (!chosen.empty()) return {chosen};
  std::vector<std::string> paths;
  for (const std::string& name : names) {
    for (const std::string& folder : folders) {
      const std::string path = folder + "/" + name;
      if (access(path.c_str(), R_OK) == 0) paths.push_back(path);
    }
  }
  paths.insert(paths.end(), names.begin(), names.end());
  return paths;
}

// NCCL reads NCCL_ALGO for each communicator; a value set by the user is kept. From 2.24 on, a bare algorithm
// applies to all operations, some of which support only ring, so ours names allreduce.
void pin_algorithm(const std::string& algorithm, int version) {
  constexpr int kFirstByOperation = 22400;
  if (algorithm.empty()) return;
  const bool alone = algorithm.find(':') == std::string::npos;
  const std::string value =
      alone && version >= kFirstByOperation ? "allreduce:" + algorithm : algorithm;
  setenv("NCCL_ALGO", value.c_str(), /*overwrite=*/0);
}

// With its version: ranks work together by the same library only.
std::string name_of(const nccl::Api& api) {
  return "NCCL " + std::to_string(api.version / 10000) + "." +
         std::to_string(api.version / 100 % 100) + "." + std::to_string(api.version % 100);
}

// Only where a profiler listens: names cost a little.
std::shared_ptr<const nvtx::Api> open_ranges(const Config& config) {
  if (config.nvtx.empty()) return nullptr;
  try {
    return open_nvtx(config);
  } catch (const Error& error) {
    log(LogLevel::kWarning, error.what());
    return nullptr;
  }
}

}  // namespace

std::shared_ptr<const cuda::Api> open_cuda(const Config& config) {
  return cuda::open(config.cuda_library);
}

std::shared_ptr<const nvrtc::Api> open_nvrtc(const Config& config) {
  return nvrtc::open(places(config.nvrtc_library, config.library_folders,
                            {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2"}));
}

std::shared_ptr<const nccl::Api> open_nccl(const Config& config) {
  return nccl::open(places(config.nccl_library, config.library_folders, {"libnccl.so.2"}));
}

std::shared_ptr<const nvtx::Api> open_nvtx(const Config& config) {
  return nvtx::open(places(config.nvtx_library, config.library_folders,
                           {"libnvtx3interop.so.1", "libnvToolsExt.so.1"}));
}

RankGpu::RankGpu(const Config& config, int ordinal, std::function<void()> ring)
    : config_(config),
      ring_(std::move(ring)),
      holds_launches_(config.gpu_order == "program"),
      device_(GpuDevice::open(open_cuda(config), ordinal)),
      module_(std::make_shared<GpuModule>(device_, *open_nvrtc(config))),
      mover_(module_),
      adasum_(module_, mover_),
      ranges_(open_ranges(config)),
      lane_(ring_, ranges_) {
  if (config.gpu_backend == "host") return;
  try {
    nccl_ = farandole::open_nccl(config);
    pin_algorithm(config.nccl_algo, nccl_->version);
  } catch (const Error& error) {
    log(LogLevel::kWarning, error.what());
  }
}

UseGpu RankGpu::describe(Rank host) const {
  const cuda::Uuid& uuid = device_->uuid();
  return {std::string(uuid.bytes, sizeof uuid.bytes), host, nccl_ ? name_of(*nccl_) : "",
          device_->name(), device_->has_multicast()};
}

std::shared_ptr<GpuWindow> RankGpu::open_window(SetId set, size_t bytes) {
  const bool registers = nccl_ && nccl_->registers_memory();
  if (!registers && !told_of_copies_.exchange(true)) {
    log(LogLevel::kWarning, nccl_ ? nccl_->path +
                                        " registers no memory: gradients are copied; NCCL 2.19 or "
                                        "newer reduces them in place"
                                  : "without NCCL gradients on GPUs are copied");
  }
  bytes = (std::max<size_t>(bytes, 1) + nccl::kWindowAlignment - 1) / nccl::kWindowAlignment *
          nccl::kWindowAlignment;
  auto window = std::make_shared<GpuWindow>(device_, registers ? nccl_ : nullptr,
                                            windows_.next_number(set), bytes);
  windows_.add(set, window);
  return window;
}

std::unique_ptr<NcclBackend> RankGpu::new_backend(const SetUp& step, int member,
                                                  int members) const {
  return std::make_unique<NcclBackend>(
      mover_, windows_, step.set,
      NcclCommunicator::Setup{nccl_, device_, member, members, nanoseconds(config_.init_timeout),
                              nanoseconds(config_.stall_abort), ring_},
      step.plain_sums);
}

// Whether the set's communicator is a part of the world's. All ranks take part, at this point of the log; not where
// their launches wait for what the program does, nor with ranks that are about to end.
bool RankGpu::may_split(const SetUp& step) const {
  return step.all_here && !holds_launches_ && nccl_->split && world_ && world_->is_set_up();
}

void RankGpu::set_up(const SetUp& step, int member, int members) {
  if (!step.step.empty()) {
    if (member >= 0) lane_.set_up(step.set, {step.step, step.bytes});
  } else if (may_split(step)) {
    split_off(step, member, members);
  } else if (member >= 0) {
    auto backend = new_backend(step, member, members);
    if (step.set == kWorldSet) world_ = backend.get();
    lane_.open(step.set, std::move(backend));
  }
}

void RankGpu::split_off(const SetUp& step, int member, int members) {
  const auto take = [this, step, member, members, begun = false](bool wanted) mutable {
    if (!std::exchange(begun, true)) {
      world_->split(member);
      return false;
    }
    const nccl::Comm part = world_->take_part();
    if (member < 0) return true;
    auto backend = new_backend(step, member, members);
    backend->connect(part);
    if (wanted) lane_.open(step.set, std::move(backend));
    return true;
  };
  lane_.push(GpuTurn{kWorldSet, step.set, take});
}

void RankGpu::open_staged(SetId set, std::unique_ptr<Lane> host, int member, int members) {
  lane_.open(set,
             std::make_unique<GpuStagedBackend>(device_, std::move(host), member, members, ring_));
}

}  // namespace farandole
