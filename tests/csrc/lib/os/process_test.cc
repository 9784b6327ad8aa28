// SPDX-License-Identifier: Apache-2.0
#include "lib/os/process.h"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vector>

#include "check.h"

namespace farandole {
namespace {

// A child that does nothing until it is killed.
class Child {
 public:
  Child() : pid_(check::fork_bound()) {
    if (pid_ != 0) return;
    for (;;) pause();
  }
  ~Child() {
    if (pid_ > 0) kill_and_reap();
  }
  pid_t pid() const { return pid_; }
  void send(int signal) const { CHECK_EQ(kill(pid_, signal), 0); }
  void await(int options) const { CHECK_EQ(waitpid(pid_, nullptr, options), pid_); }
  void kill_and_reap() {
    kill(pid_, SIGKILL);
    while (waitpid(pid_, nullptr, 0) == pid_) continue;
    pid_ = -1;
  }

 private:
  pid_t pid_;
};

PidFd watch(pid_t pid) {
  std::optional<PidFd> opened = PidFd::open(pid, process_start_time(pid).value());
  if (!opened) check::skip("no pidfds here");
  return std::move(*opened);
}

}  // namespace

TEST(a_death_is_seen_by_poll) {
  Child child;
  const PidFd watched = watch(child.pid());
  CHECK(!watched.exited());
  child.send(SIGKILL);
  pollfd event{watched.fd(), POLLIN, 0};
  CHECK_EQ(poll(&event, 1, 10'000), 1);
  CHECK((event.revents & POLLIN) != 0);
  CHECK(watched.exited());
}

TEST(a_dead_process_cannot_be_opened) {
  Child child;
  const pid_t pid = child.pid();
  const uint64_t start = process_start_time(pid).value();
  const PidFd watched = watch(pid);
  child.send(SIGKILL);
  siginfo_t info;
  CHECK_EQ(waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT), 0);
  CHECK_THROWS(PidFd::open(pid, start), ErrorCode::kPeer);  // a zombie
  child.kill_and_reap();
  CHECK_THROWS(PidFd::open(pid, start), ErrorCode::kPeer);
  CHECK(!process_start_time(pid).has_value());
  CHECK(!is_stopped(pid));
}

TEST(another_process_of_the_same_number_is_not_mistaken) {
  Child child;
  const uint64_t start = process_start_time(child.pid()).value();
  CHECK_THROWS(PidFd::open(child.pid(), start + 1), ErrorCode::kPeer);
}

TEST(the_start_time_does_not_depend_on_the_name) {
  const uint64_t start = process_start_time(getpid()).value();
  CHECK(start > 0);
  check::run_in_fork([] {
    const uint64_t before = process_start_time(getpid()).value();
    prctl(PR_SET_NAME, ") S 1 (x y");
    CHECK_EQ(process_start_time(getpid()).value(), before);
    CHECK(!is_stopped(getpid()));
  });
  Child child;
  CHECK(process_start_time(child.pid()).value() >= start);
}

TEST(a_stopped_process_is_seen) {
  Child child;
  CHECK(!is_stopped(child.pid()));
  child.send(SIGSTOP);
  child.await(WUNTRACED);
  CHECK(is_stopped(child.pid()));
  child.send(SIGCONT);
  child.await(WCONTINUED);
  CHECK(!is_stopped(child.pid()));
}

TEST(a_process_that_a_debugger_has_stopped_is_stopped) {
  const pid_t child = check::fork_bound();
  if (child == 0) {
    if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(1);
    raise(SIGSTOP);
    _exit(0);
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, WUNTRACED), child);
  const bool traced = WIFSTOPPED(status);
  if (traced) CHECK(is_stopped(child));
  if (!traced) check::skip("needs ptrace");
  CHECK_EQ(kill(child, SIGKILL), 0);
  CHECK_EQ(waitpid(child, &status, 0), child);
}

// What all tests that stop a process rely on: none is left, whatever becomes of the test.
TEST(a_stopped_child_dies_with_its_parent) {
  int ends[2];
  CHECK_EQ(pipe(ends), 0);
  check::run_in_fork([] {
    Child child;
    child.send(SIGSTOP);
    child.await(WUNTRACED);
    _exit(0);  // no destructor runs, as when a sanitizer ends a program
  });
  close(ends[1]);
  pollfd end{ends[0], POLLIN, 0};
  CHECK_EQ(poll(&end, 1, 30'000), 1);  // the child held the other end
  close(ends[0]);
}

TEST(processes_on_one_core_each_have_several_together) {
  cpu_set_t all;
  CHECK_EQ(sched_getaffinity(0, sizeof all, &all), 0);
  const int cores = CPU_COUNT(&all);
  if (cores < 2) check::skip("needs two cores");
  Child children[2];
  std::vector<pid_t> bound;
  int core = 0;
  for (const Child& child : children) {
    while (!CPU_ISSET(core, &all)) ++core;
    cpu_set_t one{};
    CPU_SET(core++, &one);
    CHECK_EQ(sched_setaffinity(child.pid(), sizeof one, &one), 0);
    bound.push_back(child.pid());
    CHECK_EQ(cores_of(bound), static_cast<int>(bound.size()));
  }
  CHECK_EQ(cores_of(std::vector<pid_t>{0, bound[0]}), cores);
}

TEST(a_process_that_has_ended_has_no_core) {
  Child child;
  const std::vector<pid_t> ended{child.pid()};
  child.kill_and_reap();
  CHECK_EQ(cores_of(ended), 1);
  CHECK_EQ(cores_of(std::vector<pid_t>{}), 1);
}

TEST(host_and_namespace_have_an_identity) {
  CHECK(pid_namespace() > 0);
  CHECK_EQ(pid_namespace(), pid_namespace());
  CHECK_EQ(boot_id().size(), 36);
  CHECK(boot_id() == boot_id());
}

}  // namespace farandole
