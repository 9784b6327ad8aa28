// SPDX-License-Identifier: Apache-2.0
#include "control/coordinator/backend_policy.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace farandole {
namespace {

std::string version_text(int32_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace

// Members of one host that use the same GPU: the first such pair.
std::optional<std::pair<Rank, Rank>> BackendPolicy::sharing(const SetState& set) const {
  for (auto a = set.ranks.begin(); a != set.ranks.end(); ++a) {
    for (auto b = set.ranks.begin(); b != a; ++b) {
      const UseGpu &one = gpus_.at(*a), &other = gpus_.at(*b);
      if (one.host == other.host && one.uuid == other.uuid) return std::pair{*b, *a};
    }
  }
  return std::nullopt;
}

// Throws what keeps the set from using GPUs together.
bool BackendPolicy::may_use_nccl(const SetState& set) {
  for (Rank rank : set.ranks) {
    if (gpus_.contains(rank)) continue;
    throw Error(ErrorCode::kInvalidArgument,
                "rank " + std::to_string(rank) +
                    " has joined before it used a GPU, so it can't take part in calls on GPUs");
  }
  const std::string& plane = settings_.gpu_plane;
  if (auto pair = sharing(set)) {
    if (settings_.shared_gpu == "error") {
      throw Error(
          ErrorCode::kInvalidArgument,
          "ranks " + std::to_string(pair->first) + " and " + std::to_string(pair->second) +
              " both use " + gpus_.at(pair->first).name +
              " of one host. Give each rank its own before its first GPU tensor: "
              "torch.cuda.set_device(farandole.local_rank()), or "
              "cupy.cuda.Device(farandole.local_rank()).use(). If they are meant to share it, set "
              "FARANDOLE_SHARED_GPU=host (through host memory), or nccl where NCCL is told to "
              "allow it (NCCL_MULTI_RANK_GPU_ENABLE=1, or a different NCCL_HOSTID in each rank)");
    }
    if (settings_.shared_gpu == "host") return false;
  }
  if (plane == "host") return false;
  const int32_t version = gpus_.at(set.ranks.front()).nccl_version;
  for (Rank rank : set.ranks) {
    const int32_t its = gpus_.at(rank).nccl_version;
    if (its == version && its != 0) continue;
    const std::string why =
        its == 0 || version == 0
            ? "no usable NCCL on rank " + std::to_string(its == 0 ? rank : set.ranks.front())
            : "NCCL " + version_text(version) + " on rank " + std::to_string(set.ranks.front()) +
                  " and " + version_text(its) + " on rank " + std::to_string(rank);
    if (plane == "nccl") throw Error(ErrorCode::kLibrary, why + "; FARANDOLE_GPU_PLANE is nccl");
    outbox_.notice("tensors on GPUs travel through host memory: " + why +
                   " (pip install nvidia-nccl-cu13, the same version everywhere)");
    return false;
  }
  return true;
}

// Whether the set's communicator is a part of the world's. All ranks take part, at this point of the log; not where
// their launches wait for what the program does, nor with ranks that are about to end.
bool BackendPolicy::may_split(const SetState& set) const {
  constexpr int32_t kFirstSplit = 21800;
  auto world = uses_nccl_.find(kWorldSet);
  const bool split_off = world != uses_nccl_.end() && world->second;
  return set.id != kWorldSet && split_off && sets_.world().left.empty() &&
         settings_.gpu_order == "background" &&
         gpus_.at(set.ranks.front()).nccl_version >= kFirstSplit;
}

void BackendPolicy::open(const SetState& set) {
  const bool nccl = may_use_nccl(set);
  outbox_.write(OpenGpu{set.id, nccl, nccl && may_split(set), set.ranks});
  uses_nccl_[set.id] = nccl;
}

}  // namespace farandole
