// SPDX-License-Identifier: Apache-2.0
#include "runtime/gpu/rank_gpu.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "data/gpu/gpu_staged_plane.h"
#include "data/nccl/nccl_plane.h"
#include "runtime/gpu/gpu_libraries.h"

namespace farandole {
namespace {

// NCCL reads its own variable whenever it makes a communicator; the user's own word stands. From 2.24 on an
// algorithm counts for all operations, of which some know no other than ring: ours means reductions.
void pin_algorithm(const std::string& algorithm, int version) {
  constexpr int kFirstByOperation = 22400;
  if (algorithm.empty()) return;
  const bool alone = algorithm.find(':') == std::string::npos;
  const std::string value =
      alone && version >= kFirstByOperation ? "allreduce:" + algorithm : algorithm;
  setenv("NCCL_ALGO", value.c_str(), /*overwrite=*/0);
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
  if (config.gpu_plane == "host") return;
  try {
    nccl_ = farandole::open_nccl(config);
    pin_algorithm(config.nccl_algo, nccl_->version);
  } catch (const Error& error) {
    log(LogLevel::kWarning, error.what());
  }
}

UseGpu RankGpu::describe(Rank host) const {
  const cuda::Uuid& uuid = device_->uuid();
  return {std::string(uuid.bytes, sizeof uuid.bytes), host, nccl_ ? nccl_->version : 0,
          device_->name()};
}

std::shared_ptr<GpuWindow> RankGpu::open_window(SetId set, size_t bytes) {
  const bool registers = nccl_ && nccl_->registers_memory();
  if (!registers && !told_of_copies_.exchange(true)) {
    log(LogLevel::kWarning, nccl_ ? nccl_->path +
                                        " registers no memory: gradients are copied; "
                                        "NCCL 2.19 or newer reduces them in place"
                                  : "without NCCL gradients on GPUs are copied");
  }
  bytes = (std::max<size_t>(bytes, 1) + nccl::kWindowAlignment - 1) / nccl::kWindowAlignment *
          nccl::kWindowAlignment;
  auto window = std::make_shared<GpuWindow>(device_, registers ? nccl_ : nullptr,
                                            windows_.next_number(set), bytes);
  windows_.add(set, window);
  return window;
}

std::string RankGpu::new_key() const {
  nccl::UniqueId id;
  nccl_->check(nccl_->unique_id(&id), "ncclGetUniqueId");
  return std::string(id.bytes, sizeof id.bytes);
}

NcclCommunicator::Setup RankGpu::setup_of(int member, int members) const {
  return {nccl_,
          device_,
          {},
          member,
          members,
          nanoseconds(config_.init_timeout),
          nanoseconds(config_.stall_abort),
          ring_,
          nullptr};
}

void RankGpu::open_nccl(SetId set, const std::string& key, int member, int members) {
  NcclCommunicator::Setup setup = setup_of(member, members);
  if (key.size() != sizeof setup.id.bytes) {
    throw Error(ErrorCode::kInternal, "an NCCL key of " + std::to_string(key.size()) + " bytes");
  }
  std::memcpy(setup.id.bytes, key.data(), key.size());
  auto plane = std::make_unique<NcclPlane>(mover_, windows_, set, std::move(setup));
  if (set == kWorldSet) world_ = plane.get();
  lane_.open(set, std::move(plane));
}

void RankGpu::split_nccl(SetId set, int member, int members) {
  const auto take = [this, set, member, members, begun = false](bool wanted) mutable {
    if (!std::exchange(begun, true)) {
      world_->split(member);
      return false;
    }
    NcclCommunicator::Setup setup = setup_of(member, members);
    setup.part = world_->take_part();
    if (member < 0) return true;
    auto plane = std::make_unique<NcclPlane>(mover_, windows_, set, std::move(setup));
    if (wanted) lane_.open(set, std::move(plane));
    return true;
  };
  lane_.push(GpuTurn{kWorldSet, set, take});
}

void RankGpu::open_staged(SetId set, std::unique_ptr<Lane> host, int member, int members) {
  lane_.open(set,
             std::make_unique<GpuStagedPlane>(device_, std::move(host), member, members, ring_));
}

}  // namespace farandole
