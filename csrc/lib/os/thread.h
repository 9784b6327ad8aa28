// SPDX-License-Identifier: Apache-2.0
// Threads of our own: named, deaf to signals (those belong to the user's threads).
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace farandole {

// `name` is cut to 15 characters by the kernel.
std::thread start_thread(const std::string& name, std::function<void()> run);

// Asks the scheduler to let this thread preempt computing ones soon: a short slice (100 us) at normal
// priority. Older kernels ignore it.
void ask_for_short_slice();

// Puts this thread before all computing ones: SCHED_RR at its lowest priority. False: the system does not
// permit it. A policy that the user chose stays.
bool ask_for_real_time();

}  // namespace farandole
