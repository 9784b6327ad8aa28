// SPDX-License-Identifier: Apache-2.0
#include "lib/os/thread.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace farandole {

namespace {

// Blocks all signals in the current thread while this object exists. New threads inherit the signal mask.
class AllSignalsBlocked {
 public:
  AllSignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~AllSignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  AllSignalsBlocked(const AllSignalsBlocked&) = delete;
  AllSignalsBlocked& operator=(const AllSignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

void Thread::join() {
  if (const int number = std::exchange(simulated_, 0)) return g_simulated_kernel->join(number);
  thread_.join();
}

Thread start_thread(const std::string& name, std::function<void()> run) {
  if (g_simulated_kernel) return Thread(g_simulated_kernel->start(std::move(run)));
  AllSignalsBlocked blocked;
  std::thread thread;
  try {
    thread = std::thread(std::move(run));
  } catch (const std::system_error& reason) {
    throw_system_error("cannot start the thread " + name, reason.code().value(),
                       "raise the limit of threads (ulimit -u, or pids.max of the cgroup)");
  }
  pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
  return Thread(std::move(thread));
}

LeavableThread::LeavableThread(const std::string& name, std::function<void()> run) {
  auto ended = std::make_shared<std::promise<void>>();
  ended_ = ended->get_future();
  thread_ = start_thread(name, [run = std::move(run), ended = std::move(ended)] {
    run();
    ended->set_value();
  });
}

bool LeavableThread::join_or_leave(Deadline deadline) {
  const std::chrono::nanoseconds left(std::max<int64_t>(deadline.ns() - now_ns(), 0));
  if (deadline.is_never() || ended_.wait_for(left) == std::future_status::ready) {
    thread_.join();
    return true;
  }
  thread_.detach();
  return false;
}

bool is_main_thread() {
  thread_local const bool is_main = ::syscall(SYS_gettid) == ::getpid();
  return is_main;
}

void ask_for_short_slice() {
  struct {  // the first version of struct sched_attr, which glibc declares only since 2.41
    uint32_t size = 48;
    uint32_t policy = 0;
    uint64_t flags = 0;
    int32_t nice = 0;
    uint32_t priority = 0;
    uint64_t runtime_ns = 0;
    uint64_t deadline_ns = 0;
    uint64_t period_ns = 0;
  } attributes;
  static_assert(sizeof(attributes) == 48);
  // Reads the attributes first, to keep the policy and nice value that the user has set.
  if (::syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0) return;
  if (attributes.policy != SCHED_OTHER) return;
  attributes.runtime_ns = 100'000;
  ::syscall(SYS_sched_setattr, 0, &attributes, 0);
}

void ask_for_punctual_sleeps() {
  ::prctl(PR_SET_TIMERSLACK, 1UL);  // nanoseconds; 0 would mean the default
}

bool ask_for_real_time() {
  if (sched_getscheduler(0) != SCHED_OTHER) return true;
  sched_param lowest{};
  lowest.sched_priority = sched_get_priority_min(SCHED_RR);
  return sched_setscheduler(0, SCHED_RR | SCHED_RESET_ON_FORK, &lowest) == 0;
}

}  // namespace farandole
