// SPDX-License-Identifier: Apache-2.0
#include "control/coordinator/backend_policy.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace farandole {

// The first two members of one host that use the same GPU.
std::optional<std::pair<Rank, Rank>> BackendPolicy::sharing(const SetState& set) const {
  for (auto a = set.ranks.begin(); a != set.ranks.end(); ++a) {
    for (auto b = set.ranks.begin(); b != a; ++b) {
      const UseGpu &one = gpus_.at(*a), &other = gpus_.at(*b);
      if (one.host == other.host && one.uuid == other.uuid) return std::pair{*b, *a};
    }
  }
  return std::nullopt;
}

// Throws the reason if the set can't use GPUs together.
BackendKind BackendPolicy::backend_of(const SetState& set) {
  for (Rank rank : set.ranks) {
    if (gpus_.contains(rank)) continue;
    throw Error(ErrorCode::kInvalidArgument,
                "rank " + std::to_string(rank) +
                    " has joined before it used a GPU, so it can't take part in calls on GPUs");
  }
  const std::string& backend = settings_.gpu_backend;
  if (auto pair = sharing(set)) {
    if (settings_.shared_gpu == "error") {
      throw Error(
          ErrorCode::kInvalidArgument,
          "ranks " + std::to_string(pair->first) + " and " + std::to_string(pair->second) +
              " both use " + gpus_.at(pair->first).name +
              " of one host. Give each rank its own before its first GPU tensor: "
              "torch.cuda.set_device(farandole.local_rank()), "
              "cupy.cuda.Device(farandole.local_rank()).use(), or before JAX's first array "
              "jax.config.update('jax_cuda_visible_devices', str(farandole.local_rank())). If they "
              "are meant to share it, set "
              "FARANDOLE_SHARED_GPU=host (through host memory), or nccl if NCCL is told to "
              "allow it (NCCL_MULTI_RANK_GPU_ENABLE=1, or a different NCCL_HOSTID in each rank)");
    }
    if (settings_.shared_gpu == "host") return BackendKind::kStaged;
  }
  if (backend == "host") return BackendKind::kStaged;
  const std::string& library = gpus_.at(set.ranks.front()).library;
  for (Rank rank : set.ranks) {
    const std::string& its = gpus_.at(rank).library;
    if (its == library && !its.empty()) continue;
    const std::string why =
        its.empty() || library.empty()
            ? "no usable NCCL on rank " + std::to_string(its.empty() ? rank : set.ranks.front())
            : library + " on rank " + std::to_string(set.ranks.front()) + " and " + its +
                  " on rank " + std::to_string(rank);
    if (backend != "auto") {
      throw Error(ErrorCode::kLibrary, why + "; FARANDOLE_GPU_BACKEND is " + backend);
    }
    outbox_.notice("tensors on GPUs travel through host memory: " + why +
                   " (pip install nvidia-nccl-cu13, the same version everywhere)");
    return BackendKind::kStaged;
  }
  return BackendKind::kLibrary;
}

void BackendPolicy::open(const SetState& set) {
  const BackendKind backend = backend_of(set);
  // The other ranks don't know a pair, so they can't take part.
  const bool all_here = sets_.world().left.empty() && !is_pair(set.id);
  // Members that differ in this would call the library with different operators.
  constexpr size_t kFewestOnSwitch = 3;
  const bool plain_sums =
      set.ranks.size() >= kFewestOnSwitch &&
      std::ranges::all_of(set.ranks, [&](Rank rank) { return gpus_.at(rank).multicast; });
  outbox_.write(SetUp{set.id, "", "", backend, all_here, plain_sums, set.ranks});
  open_[set.id];
}

// Every member is told before it may have to launch by it.
void BackendPolicy::ask(const SetState& set, Rank from, const SetUp& step) {
  std::map<std::string, PendingStep>& steps = open_[set.id];
  PendingStep& pending = steps[step.step];
  if (from == set.ranks.front()) pending.bytes = step.bytes;
  if (++pending.members < set.members()) return;
  outbox_.write(SetUp{set.id, step.step, std::move(pending.bytes)});
  steps.erase(step.step);
}

}  // namespace farandole
