// SPDX-License-Identifier: Apache-2.0
// Starts the core's own threads: named, with all signals blocked (signals belong to the user's threads).
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace farandole {

// The kernel allows 15 characters; a longer `name` is cut.
std::thread start_thread(const std::string& name, std::function<void()> run);

// Asks the scheduler for a short slice (100 us) at normal priority, so that this thread soon preempts
// computing ones. Older kernels ignore it.
void ask_for_short_slice();

// Lets this thread preempt all normal ones: SCHED_RR at its lowest priority. False: not permitted. A policy
// that the user chose is kept.
bool ask_for_real_time();

}  // namespace farandole
