// SPDX-License-Identifier: Apache-2.0
// Lets somebody know when a plane works on which part of a block, at no cost while nobody listens.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>

#include "base/clock.h"

namespace farandole {

enum class Phase { kStage, kReduce, kConsume };

struct PhaseWatch {
  const std::atomic<bool>* listening = nullptr;  // nullptr: nobody ever does
  std::function<void(Phase, int64_t begin_ns, int64_t end_ns)> saw = {};

  // Carries out `work` as this phase.
  template <class Work>
  void time(Phase phase, Work&& work) const {
    const bool told = listening != nullptr && listening->load(std::memory_order_relaxed);
    const int64_t begin = told ? now_ns() : 0;
    std::forward<Work>(work)();
    if (told) saw(phase, begin, now_ns());
  }
};

}  // namespace farandole
