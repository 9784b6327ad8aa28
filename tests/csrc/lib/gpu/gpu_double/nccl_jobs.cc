// SPDX-License-Identifier: Apache-2.0
// What a non-blocking communicator does in threads of NCCL's own, and who may call it meanwhile.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <utility>

#include "lib/gpu/gpu_double/nccl_comm.h"

namespace farandole::check {
namespace {

using Clock = std::chrono::steady_clock;

struct Job {
  nccl::Comm comm;
  Clock::time_point due;
  std::function<bool()> ready;
  std::function<void()> finish;
};

// Under the hardware's lock. Never destroyed: their thread works until the process ends.
std::list<Job>& jobs = *new std::list<Job>;
std::condition_variable_any& begun = *new std::condition_variable_any;

void work() {
  auto lock = Hardware::instance().lock();
  for (;;) {
    begun.wait(lock, [] { return !jobs.empty(); });
    for (auto job = jobs.begin(); job != jobs.end();) {
      if (Clock::now() < job->due || !job->ready()) {
        ++job;
        continue;
      }
      job->finish();
      if (job->comm->state == nccl::kInProgress) job->comm->state = nccl::kSuccess;
      job = jobs.erase(job);
      Hardware::instance().changed();
    }
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(5));
    lock.lock();
  }
}

}  // namespace

// A thread is started for it: some tens of microseconds.
void begin_job(Hardware& hardware, nccl::Comm comm, std::function<bool()> ready,
               std::function<void()> finish) {
  static const bool started = [] {
    std::thread(work).detach();
    return true;
  }();
  static_cast<void>(started);
  comm->state = nccl::kInProgress;
  const auto due = Clock::now() + std::chrono::microseconds(20 + hardware.random.below(40));
  jobs.push_back({comm, due, std::move(ready), std::move(finish)});
  begun.notify_all();
}

void drop_jobs(nccl::Comm comm) {
  jobs.remove_if([&](const Job& job) { return job.comm == comm; });
}

nccl::Result ensure_ready(nccl::Comm comm) {
  return comm->state == nccl::kInProgress ? kInvalidArgument : comm->state;
}

OneThread::OneThread(nccl::Comm comm) : user_(comm->user) {
  std::thread::id nobody;
  const std::thread::id me = std::this_thread::get_id();
  outermost_ = user_->compare_exchange_strong(nobody, me);
  if (outermost_ || nobody == me) return;
  std::fprintf(stderr, "NCCL double: two threads use a communicator at once\n");
  std::abort();
}

OneThread::~OneThread() {
  if (outermost_) *user_ = std::thread::id();
}

}  // namespace farandole::check
