// SPDX-License-Identifier: Apache-2.0
// The coordinator and GPUs: how a process set's tensors on GPUs will travel, decided once for all its members
// before their first bucket.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "control/coordinator/coordinator.h"

namespace farandole {
namespace {

std::string version_text(int32_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace

void Coordinator::on(Rank from, const UseGpu& gpu, int64_t) { gpus_[from] = gpu; }

// Every member is told before it may have to launch with it.
void Coordinator::on(Rank from, const GpuKey& key, int64_t) {
  if (set_of(key.set, from)) log_.push_back(key);
}

// Members of one host that use the same GPU: the first such pair.
std::optional<std::pair<Rank, Rank>> Coordinator::sharing(const Set& set) const {
  for (auto a = set.ranks.begin(); a != set.ranks.end(); ++a) {
    for (auto b = set.ranks.begin(); b != a; ++b) {
      const UseGpu &one = gpus_.at(*a), &other = gpus_.at(*b);
      if (one.host == other.host && one.uuid == other.uuid) return std::pair{*b, *a};
    }
  }
  return std::nullopt;
}

// Throws what keeps the set from using GPUs together.
bool Coordinator::may_use_nccl(const Set& set) {
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
    notices_.push_back("tensors on GPUs travel through host memory: " + why +
                       " (pip install nvidia-nccl-cu13, the same version everywhere)");
    return false;
  }
  return true;
}

// Whether the set's communicator is a part of the world's. All ranks take part, at this point of the log; not where
// their launches wait for what the program does, nor with ranks that are about to end.
bool Coordinator::may_split(const Set& set) const {
  constexpr int32_t kFirstSplit = 21800;
  const Set& world = *sets_.at(kWorldSet);
  return set.id != kWorldSet && world.has_nccl && world.left.empty() &&
         settings_.gpu_order == "background" &&
         gpus_.at(set.ranks.front()).nccl_version >= kFirstSplit;
}

// False: the set's next call was on GPUs and has failed.
bool Coordinator::open_gpu(Set& set) {
  if (set.has_gpu) return true;
  Call& call = *set.on_gpus.front();
  try {
    set.has_nccl = may_use_nccl(set);
    log_.push_back(OpenGpu{set.id, set.has_nccl, set.has_nccl && may_split(set), set.ranks});
    set.has_gpu = true;
    return true;
  } catch (const Error& error) {
    set.on_gpus.pop_front();
    fail(call, {error.code(), error.what()});
    return false;
  }
}

}  // namespace farandole
