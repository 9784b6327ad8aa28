// SPDX-License-Identifier: Apache-2.0
// GpuAccess creates the RankGpu on the thread that submits the first GPU tensor. Afterwards, the driver uses it.
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

// Sets NCCL_ALGO, which NCCL reads for each communicator, unless the user has set it. From NCCL 2.24 on, an algorithm
// without a prefix applies to all operations. Some operations support only ring, so this function adds "allreduce:".
void pin_algorithm(const std::string& algorithm, int version) {
  constexpr int kFirstByOperation = 22400;
  if (algorithm.empty()) return;
  const bool alone = algorithm.find(':') == std::string::npos;
  const std::string value =
      alone && version >= kFirstByOperation ? "allreduce:" + algorithm : algorithm;
  setenv("NCCL_ALGO", value.c_str(), /*overwrite=*/0);
}

// Returns a name that includes the version, because all ranks need the same version.
std::string name_of(const nccl::Api& api) {
  return "NCCL " + std::to_string(api.version / 10000) + "." +
         std::to_string(api.version / 100 % 100) + "." + std::to_string(api.version % 100);
}

// Returns nullptr if no profiler is attached, because names would then only cost time.
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
          device_->name()};
}

void RankGpu::open_library(const OpenGpu& step, int member, int members) {
  if (!step.key.empty()) return lane_.connect(step.set, step.key);
  const NcclCommunicator::Setup setup{nccl_,
                                      device_,
                                      member,
                                      members,
                                      nanoseconds(config_.init_timeout),
                                      nanoseconds(config_.silence_limit()),
                                      ring_};
  lane_.open(step.set, std::make_unique<NcclBackend>(mover_, setup));
}

void RankGpu::open_staged(SetId set, std::unique_ptr<Backend> host, int member, int members) {
  lane_.open(set,
             std::make_unique<GpuStagedBackend>(device_, std::move(host), member, members, ring_));
}

}  // namespace farandole
