// SPDX-License-Identifier: Apache-2.0
#include "core/rank_gpu.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "core/error.h"
#include "core/log.h"
#include "data/gpu_staged_plane.h"
#include "data/nccl_plane.h"

namespace farandole {
namespace {

// FARANDOLE_..._LIBRARY alone, if it is set; else what the process has, packages' folders, the loader's.
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

std::chrono::nanoseconds nanoseconds(double seconds) {
  return std::chrono::nanoseconds(static_cast<int64_t>(std::min(seconds, 1e9) * 1e9));
}

// NCCL reads its own variable once, when the first communicator is made; the user's own word stands.
void pin_algorithm(const std::string& algorithm) {
  if (!algorithm.empty()) setenv("NCCL_ALGO", algorithm.c_str(), /*overwrite=*/0);
}

}  // namespace

RankGpu::RankGpu(const Config& config, int ordinal, std::function<void()> ring)
    : config_(config),
      ring_(std::move(ring)),
      holds_launches_(config.gpu_order == "program"),
      lane_(ring_) {
  const std::vector<std::string>& folders = config.library_folders;
  device_ = GpuDevice::open(cuda::open(config.cuda_library), ordinal);
  const auto compiler = nvrtc::open(places(
      config.nvrtc_library, folders, {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2"}));
  mover_ = std::make_unique<GpuMover>(device_, *compiler);
  if (config.gpu_plane == "host") return;
  pin_algorithm(config.nccl_algo);
  try {
    nccl_ = nccl::open(places(config.nccl_library, folders, {"libnccl.so.2"}));
  } catch (const Error& error) {
    log(LogLevel::kWarning, error.what());
  }
}

UseGpu RankGpu::describe(Rank host) const {
  const cuda::Uuid& uuid = device_->uuid();
  return {std::string(uuid.bytes, sizeof uuid.bytes), host, nccl_ ? nccl_->version : 0,
          device_->name()};
}

std::string RankGpu::new_key() const {
  nccl::UniqueId id;
  nccl_->check(nccl_->unique_id(&id), "ncclGetUniqueId");
  return std::string(id.bytes, sizeof id.bytes);
}

void RankGpu::open_nccl(SetId set, const std::string& key, int member, int members) {
  NcclCommunicator::Setup setup{nccl_,
                                device_,
                                {},
                                member,
                                members,
                                nanoseconds(config_.init_timeout),
                                nanoseconds(config_.stall_abort),
                                ring_};
  if (key.size() != sizeof setup.id.bytes) {
    throw Error(ErrorCode::kInternal, "an NCCL key of " + std::to_string(key.size()) + " bytes");
  }
  std::memcpy(setup.id.bytes, key.data(), key.size());
  lane_.open(set, std::make_unique<NcclPlane>(*mover_, std::move(setup)));
}

void RankGpu::open_staged(SetId set, std::unique_ptr<Lane> host, int member) {
  lane_.open(set, std::make_unique<GpuStagedPlane>(device_, std::move(host), member, ring_));
}

}  // namespace farandole
